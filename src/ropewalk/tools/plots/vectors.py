"""Plot the rotation of one pair, and of all pairs of a head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.tools.plots.figure import GREY, blank, check_rope, colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rotated_vector(rope: Rope, *, pair: int = 0, tokens: int = 6) -> Figure:
    """Plot the vector (1, 0) in one pair of channels, rotated to positions 0, 1, 2 and so on.

    Args:
        rope: any rope. The vector is rotated with `rope.at`.
        pair: the index of the pair, from 0 to rotary_dim // 2 − 1.
        tokens: the number of positions, from 1 to 16.

    Returns:
        A Figure with one arrow for each position, and the unit circle. Both axes are dimensionless and have the same
        scale.

    Raises:
        RopeError: rope is not a Rope, pair or tokens is out of range, or matplotlib is not installed.
    """
    check_rope("plots.rotated_vector", rope)
    _checks.integer("plots.rotated_vector", "pair", pair, at_least=0, at_most=rope.rotary_dim // 2 - 1)
    _checks.integer("plots.rotated_vector", "tokens", tokens, at_least=1, at_most=16)
    figure = blank(height=7.0)
    axes = figure.subplots()
    speed = rope.inv_freq[pair]
    circle = np.linspace(0, 2 * math.pi, 361)
    axes.plot(np.cos(circle), np.sin(circle), color=GREY, linewidth=1, label="unit circle")
    shades = colours(tokens)
    for position, (x, y) in enumerate(_rotated_unit_vector(rope, pair, tokens)):
        label = f"position {position}: {position * speed:.4g} rad"
        axes.quiver(
            0, 0, x, y, angles="xy", scale_units="xy", scale=1, width=0.008, color=shades[position], label=label
        )
        axes.annotate(str(position), (1.1 * x, 1.1 * y), ha="center", va="center", fontsize=13, color=shades[position])
    limit = 1.25 * max(1.0, rope.attention_factor)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axes.set_xlabel("first channel of the pair (dimensionless)")
    axes.set_ylabel("second channel of the pair (dimensionless)")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    factor = "" if rope.attention_factor == 1.0 else f", times the attention factor {rope.attention_factor:.4g}"
    axes.set_title(f"(1, 0) rotated by its position: pair {pair}, {speed:.4g} rad per token{factor}")
    return figure


def pairs(rope: Rope, *, tokens: int = 256) -> Figure:
    """Plot cos(position · inverse frequency) of all pairs of a head as a heat map.

    Args:
        rope: any rope.
        tokens: the number of positions, from 2 to 4096. The first position is 0.

    Returns:
        A Figure whose colour is the cosine, without attention factor, over the position (tokens) and the pair index.
        The right axis shows the wavelength of some pairs. A line marks the first full turn of each pair.

    Raises:
        RopeError: rope is not a Rope, tokens is out of range, or matplotlib is not installed.
    """
    check_rope("plots.pairs", rope)
    _checks.integer("plots.pairs", "tokens", tokens, at_least=2, at_most=4096)
    figure = blank(height=6.5)
    axes = figure.subplots()
    speed, wavelength = rope.inv_freq, rope.wavelength
    cosines = np.cos(np.outer(speed, np.arange(tokens)))
    image = axes.imshow(cosines, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
    first_turn = np.where(wavelength < tokens, wavelength, np.nan)
    axes.plot(first_turn, np.arange(len(speed)), color="black", linewidth=2, label="first full turn (one wavelength)")
    axes.set(xlim=(-0.5, tokens - 0.5), ylim=(len(speed) - 0.5, -0.5))
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("pair index (0 is the fastest)")
    right = axes.secondary_yaxis("right")
    shown = np.unique(np.linspace(0, len(speed) - 1, min(9, len(speed))).round().astype(int))
    right.set_yticks(shown, [f"{wavelength[i]:,.{0 if wavelength[i] >= 100 else 1}f}" for i in shown])
    right.set_ylabel("wavelength (tokens per full turn)")
    figure.colorbar(image, ax=axes, label="cos(position · inverse frequency), dimensionless", pad=0.02)
    axes.legend(loc="lower right")
    slow = int((wavelength >= tokens).sum())
    axes.set_title(f"The {len(speed)} pairs of a head over {tokens:,} tokens: {slow} make less than one full turn")
    return figure


def _rotated_unit_vector(rope: Rope, pair: int, tokens: int) -> np.ndarray:
    """Rotate the vector (1, 0) in one pair to positions 0 to tokens − 1. Return float64 `[tokens, 2]`."""
    import torch

    half = rope.pairing == "half"
    first = rope.rotary_offset + (pair if half else 2 * pair)
    second = first + (rope.rotary_dim // 2 if half else 1)
    x = torch.zeros(tokens, 1, rope.head_dim, dtype=torch.float64)
    x[..., first] = 1.0
    positions = torch.arange(tokens)
    positions = (
        positions if rope.axes is None else positions.expand(rope.axes.count, -1)
    )  # text has the same position on all axes
    rotated = rope.at(positions, dtype=torch.float64)(x, layout="thd")
    return rotated[:, 0, [first, second]].numpy()
