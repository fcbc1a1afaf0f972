"""How fast each pair turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope
from ropewalk.plots.figure import BLUE, GREY, ORANGE, blank, check_rope, colours, names_of, scheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike


def inv_freq(rope: Rope, *, axis_names: Sequence[str] = ()) -> Figure:
    """Speed of each pair before and after scaling, and the trained length where the scheme knows it.

    Args:
        rope: any rope with a scaling or without.
        axis_names: what its axes are, for the legend: `.axis_names` of a model's ropes or of its tower.

    Returns:
        A Figure: inverse frequency (radians per token, log axis) over pair index; on the right the wavelength in
        tokens. "Before" is the same Rope with scaling None. Idle pairs (inverse frequency 0) are not drawn. Where the
        rope has several axes, the colour of a pair's marker says to which of them it listens, and the units are
        positions in place of tokens.

    Raises:
        RopeError: rope is no Rope, axis_names are not those of its axes, or matplotlib is missing.
    """
    check_rope("plots.inv_freq", rope)
    names = names_of("plots.inv_freq", rope, axis_names)
    unit = "token" if rope.axes is None else "position"
    figure = blank(height=6.0)
    axes = figure.subplots()
    before, after = dataclasses.replace(rope, scaling=None).inv_freq, rope.inv_freq
    axes.set_yscale("log")
    if rope.scaling is None:
        axes.plot(_drawn(after), "o-", color=BLUE, markersize=4, label="no scaling")
    else:
        axes.plot(_drawn(before), "o--", color=GREY, markersize=4, label="before scaling")
        axes.plot(_drawn(after), "o-", color=BLUE, markersize=4, label=f"after scaling: {scheme(rope)}")
    if rope.axes is not None:
        of_each = np.array(rope.axes.axis)
        for axis, colour in enumerate(colours(rope.axes.count)):
            (pairs,) = np.nonzero((of_each == axis) & (after > 0))
            axes.plot(pairs, after[pairs], "s", color=colour, zorder=3, label=names[axis])
    trained = None if rope.scaling is None else rope.scaling.trained_length(None)
    if trained is not None:
        label = f"one turn within the trained length of {trained:,} tokens"
        axes.axhline(2 * math.pi / trained, color=ORANGE, label=label)
    axes.set_xlabel("pair index (0 turns fastest)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(f"inverse frequency (radians per {unit})")
    tokens = axes.secondary_yaxis("right", functions=(_wavelength, _wavelength))
    tokens.set_ylabel(f"wavelength ({unit}s per full turn)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"How fast each of the {len(after)} pairs turns (base {rope.base:,.10g}, {scheme(rope)})")
    return figure


def _drawn(speed: np.ndarray) -> np.ndarray:
    """The speeds that a log axis can show: NaN in the place of 0."""
    return np.where(speed > 0, speed, np.nan)


def _wavelength(speed: ArrayLike) -> ArrayLike:
    """Tokens per turn from radians per token, and back: it is its own inverse."""
    with np.errstate(divide="ignore"):
        return 2 * math.pi / np.asarray(speed, dtype=np.float64)
