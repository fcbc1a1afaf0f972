"""Pictures of a rope: how fast its pairs turn, what a turn looks like, and what distance does to a score.

Each function takes a Rope (`times_copy` a benchmark's rows) and returns a matplotlib Figure, 1000 pixels wide; `save`
writes it. No pyplot and no global
state, so no display is needed. matplotlib comes with `pip install "ropewalk[plots]"`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk import Rope, _checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

FORMATS = ("png", "svg", "pdf")

_BLUE, _ORANGE, _GREY = "tab:blue", "tab:orange", "0.45"
_MOST_DISTANCES = 2000


def inv_freq(rope: Rope) -> Figure:
    """Speed of each pair before and after scaling, and the trained length where the scheme knows it.

    Args:
        rope: any rope with a scaling or without.

    Returns:
        A Figure: inverse frequency (radians per token, log axis) over pair index; on the right the wavelength in
        tokens. "Before" is the same Rope with scaling None. Idle pairs (inverse frequency 0) are not drawn. Where the
        rope has several axes, the colour of a pair's marker says to which of them it listens.

    Raises:
        RopeError: matplotlib is missing.
    """
    figure = blank(height=6.0)
    axes = figure.subplots()
    before, after = dataclasses.replace(rope, scaling=None).inv_freq, rope.inv_freq
    axes.set_yscale("log")
    if rope.scaling is None:
        axes.plot(_drawn(after), "o-", color=_BLUE, markersize=4, label="no scaling")
    else:
        axes.plot(_drawn(before), "o--", color=_GREY, markersize=4, label="before scaling")
        axes.plot(_drawn(after), "o-", color=_BLUE, markersize=4, label=f"after scaling: {_scheme(rope)}")
    if rope.axes is not None:
        of_each, colours = np.array(rope.axes.axis), _colours(rope.axes.count)
        for axis, colour in enumerate(colours):
            (pairs,) = np.nonzero((of_each == axis) & (after > 0))
            axes.plot(pairs, after[pairs], "s", color=colour, zorder=3, label=f"axis {axis}")
    trained = None if rope.scaling is None else rope.scaling.trained_length(None)
    if trained is not None:
        label = f"one turn within the trained length of {trained:,} tokens"
        axes.axhline(2 * math.pi / trained, color=_ORANGE, label=label)
    axes.set_xlabel("pair index (0 turns fastest)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("inverse frequency (radians per token)")
    tokens = axes.secondary_yaxis("right", functions=(_wavelength, _wavelength))
    tokens.set_ylabel("wavelength (tokens per full turn)")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"How fast each of the {len(after)} pairs turns (base {rope.base:,.10g}, {_scheme(rope)})")
    return figure


def rotated_vector(rope: Rope, *, pair: int = 0, tokens: int = 6) -> Figure:
    """The vector (1, 0) in one pair of channels, turned by the rope at positions 0, 1, 2, …

    Args:
        rope: any rope; the library itself turns the vector.
        pair: which pair, from 0 to rotary_dim // 2 − 1.
        tokens: how many positions, from 1 to 16.

    Returns:
        A Figure: one arrow for each position and the unit circle; both axes dimensionless, of equal scale.

    Raises:
        RopeError: pair or tokens is out of range, or matplotlib is missing.
    """
    _check("rotated_vector", "pair", pair, at_least=0, at_most=rope.rotary_dim // 2 - 1)
    _check("rotated_vector", "tokens", tokens, at_least=1, at_most=16)
    figure = blank(height=7.0)
    axes = figure.subplots()
    speed = rope.inv_freq[pair]
    turn = np.linspace(0, 2 * math.pi, 361)
    axes.plot(np.cos(turn), np.sin(turn), color=_GREY, linewidth=1, label="unit circle")
    colours = _colours(tokens)
    for position, (x, y) in enumerate(_turned_unit_vector(rope, pair, tokens)):
        label = f"position {position}: {position * speed:.4g} rad"
        axes.quiver(
            0, 0, x, y, angles="xy", scale_units="xy", scale=1, width=0.008, color=colours[position], label=label
        )
        axes.annotate(str(position), (1.1 * x, 1.1 * y), ha="center", va="center", fontsize=13, color=colours[position])
    limit = 1.25 * max(1.0, rope.attention_factor)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axes.set_xlabel("first channel of the pair (dimensionless)")
    axes.set_ylabel("second channel of the pair (dimensionless)")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    factor = "" if rope.attention_factor == 1.0 else f", times the attention factor {rope.attention_factor:.4g}"
    axes.set_title(f"(1, 0) turned by its position: pair {pair}, {speed:.4g} rad per token{factor}")
    return figure


def pairs(rope: Rope, *, tokens: int = 256) -> Figure:
    """All pairs of a head at once: cos(position · inverse frequency) as colours, so that fast and slow pairs show.

    Args:
        rope: any rope.
        tokens: how many positions from 0 on, from 2 to 4096.

    Returns:
        A Figure: colour is the cosine (without attention factor) over position (tokens) and pair index; on the right
        the wavelength of some pairs. A line shows where each pair has made its first full turn.

    Raises:
        RopeError: tokens is out of range, or matplotlib is missing.
    """
    _check("pairs", "tokens", tokens, at_least=2, at_most=4096)
    figure = blank(height=6.5)
    axes = figure.subplots()
    speed, wavelength = rope.inv_freq, rope.wavelength
    cosines = np.cos(np.outer(speed, np.arange(tokens)))
    image = axes.imshow(cosines, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1)
    first_turn = np.where(wavelength < tokens, wavelength, np.nan)
    axes.plot(first_turn, np.arange(len(speed)), color="black", linewidth=2, label="first full turn (one wavelength)")
    axes.set(xlim=(-0.5, tokens - 0.5), ylim=(len(speed) - 0.5, -0.5))
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("pair index (0 turns fastest)")
    right = axes.secondary_yaxis("right")
    shown = np.unique(np.linspace(0, len(speed) - 1, min(9, len(speed))).round().astype(int))
    right.set_yticks(shown, [f"{wavelength[i]:,.{0 if wavelength[i] >= 100 else 1}f}" for i in shown])
    right.set_ylabel("wavelength (tokens per full turn)")
    figure.colorbar(image, ax=axes, label="cos(position · inverse frequency), dimensionless", pad=0.02)
    axes.legend(loc="lower right")
    slow = int((wavelength >= tokens).sum())
    axes.set_title(f"The {len(speed)} pairs of a head over {tokens:,} tokens: {slow} make less than one full turn")
    return figure


def decay(rope: Rope, *, longest: int = 131_072) -> Figure:
    """What distance does to a score: the bound of the RoPE paper, and the score of an actual q and k.

    With h_i what pair i adds to the score at distance 0 (a complex number), and h = 0 after the last pair, the score
    divided by the number of pairs is at most max |h_{i+1} − h_i| times mean |S_j|, S_j = Σ_{i<j} e^(𝒾·distance·θ_i).
    The picture shows mean |S_j| and an actual score, that of q = k, all ones, over its value at distance 0: mean
    cos(distance·θ_i). There h = 1 in every pair, the largest step is 1, and both are in the same units. The bound is
    only a bound and does not fall steadily; dots mark the largest rise among the distances drawn.

    Args:
        rope: any rope. Its attention factor is left out.
        longest: greatest distance, in tokens, at least 1.

    Returns:
        A Figure: above, both over distance (tokens, log axis from 1 on); below, the score alone, larger. At most
        2000 distances are drawn, all of them up to about a hundred.

    Raises:
        RopeError: longest is out of range, or matplotlib is missing.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.3 and figure 2.
    """
    _check("decay", "longest", longest, at_least=1, at_most=2**31 - 1)
    figure = blank(height=7.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_decay(upper, lower, rope.inv_freq, _distances(longest))
    figure.suptitle(
        f"Score and distance ({len(rope.inv_freq)} pairs, base {rope.base:,.10g}, {_scheme(rope)})\n"
        "The bound only limits scores from above; neither it nor the score has to fall steadily"
    )
    return figure


def times_copy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """What `ropewalk bench` measured: time of each contender over the time of copying q and k.

    Args:
        rows: of `ropewalk.programs.bench`; those that were not timed are left out.

    Returns:
        A Figure: one panel for each dtype and direction; median time / median time of `copy_` (dimensionless, log axis)
        over tokens (log axis). 1 is the time of a copy.

    Raises:
        RopeError: matplotlib is missing.
    """
    timed = [row for row in rows if row["state"] == "timed"]
    panels = list(dict.fromkeys((row["dtype"], row["backward"]) for row in timed)) or [("", False)]
    names = list(dict.fromkeys(row["contender"] for row in timed))
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = blank(height=4.0 * lines + 2.0)
    drawn = {}
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        for i, name in enumerate(names):
            of_it = [row for row in timed if (row["dtype"], row["backward"], row["contender"]) == (*panel, name)]
            points = sorted((row["tokens"], row["times_copy"]) for row in of_it)
            if points:
                style = {"color": f"C{i % 10}", "marker": "o" if i < 10 else "s", "markersize": 4}
                (drawn[name],) = axes.loglog(*zip(*points, strict=True), linestyle="-" if i < 10 else "--", **style)
        passes = "forward + backward" if panel[1] else "forward"
        axes.set(xlabel="tokens", ylabel="time over time of copy_ (dimensionless)", title=f"{panel[0]}, {passes}")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=4)
    return figure


def blank(*, height: float) -> Figure:
    """An empty figure 1000 pixels wide; height in units of 100 pixels.

    Raises:
        RopeError: matplotlib is missing, or MPLBACKEND names a backend that it does not know.
    """
    try:
        import matplotlib.figure
    except ImportError as e:
        fix = 'Run pip install "ropewalk[plots]".'
        raise _checks.error("plots", "matplotlib must be installed", "no such package", fix) from e
    except ValueError as e:  # matplotlib refuses MPLBACKEND when it is imported, though a picture needs no backend
        raise _checks.error("plots", "matplotlib must accept its settings", str(e), "Unset MPLBACKEND.") from e
    return matplotlib.figure.Figure(figsize=(10.0, height), dpi=100, layout="constrained")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF, as the suffix of path says; an existing file is overwritten.

    Raises:
        RopeError: the folder does not exist, the suffix is another one, or the file cannot be written.
    """
    path = check_path(path)
    try:
        figure.savefig(path)
    except OSError as e:
        got = f"{str(path)!r} ({e.strerror})"
        raise _checks.error("plots.save", "path must be writable", got, "Pass another.") from e


def check_path(path: str | Path) -> Path:
    """The path, if a picture can be written there.

    Raises:
        RopeError: the folder does not exist, or the suffix is not one of `FORMATS`.
    """
    path = Path(path)
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        listed = ", ".join("." + name for name in FORMATS)
        must = f"path must end in one of {listed}"
        raise _checks.error("plots.save", must, repr(str(path)), "Change the file's name.")
    if not path.parent.is_dir():
        raise _checks.error("plots.save", "the folder of path must exist", repr(str(path.parent)), "Create it first.")
    return path


def _check(who: str, name: str, value: object, *, at_least: int, at_most: int) -> None:
    _checks.integer(f"plots.{who}", name, value, at_least=at_least, at_most=at_most)


def _scheme(rope: Rope) -> str:
    return "no scaling" if rope.scaling is None else rope.scaling.label


def _drawn(speed: np.ndarray) -> np.ndarray:
    """The speeds that a log axis can show: NaN in the place of 0."""
    return np.where(speed > 0, speed, np.nan)


def _wavelength(speed: ArrayLike) -> ArrayLike:
    """Tokens per turn from radians per token, and back: it is its own inverse."""
    with np.errstate(divide="ignore"):
        return 2 * math.pi / np.asarray(speed, dtype=np.float64)


def _colours(count: int) -> np.ndarray:
    """RGBA colours `[count, 4]` from dark to light, in the order of positions."""
    import matplotlib

    colours: np.ndarray = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, count))
    return colours


def _turned_unit_vector(rope: Rope, pair: int, tokens: int) -> np.ndarray:
    """(1, 0) in one pair, turned by the rope at positions 0 … tokens − 1: float64 `[tokens, 2]`."""
    import torch

    half = rope.pairing == "half"
    first = rope.rotary_offset + (pair if half else 2 * pair)
    second = first + (rope.rotary_dim // 2 if half else 1)
    x = torch.zeros(tokens, 1, rope.head_dim, dtype=torch.float64)
    x[..., first] = 1.0
    positions = torch.arange(tokens)
    positions = positions if rope.axes is None else positions.expand(rope.axes.count, -1)  # as text
    turned = rope.at(positions, dtype=torch.float64)(x, layout="thd")
    return turned[:, 0, [first, second]].numpy()


def _distances(longest: int) -> np.ndarray:
    """0, and whole distances evenly spread over the logarithm from 1 to longest: int64, ascending, in tokens."""
    spread = np.geomspace(1, longest, _MOST_DISTANCES - 1).round().astype(np.int64)
    return np.unique(np.append(spread, 0))


def _bound_and_score(speed: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean |S_j| and mean cosine at each distance, float64 `[distances]`; speed `[pairs]`, radians per token."""
    turns = np.exp(1j * np.outer(distance, speed))
    return np.abs(turns.cumsum(axis=1)).mean(axis=1), turns.real.mean(axis=1)


def _draw_decay(upper: Axes, lower: Axes, speed: np.ndarray, distance: np.ndarray) -> None:
    bound, score = _bound_and_score(speed, distance)
    upper.plot(distance, bound, color=_BLUE, linewidth=1, label="upper bound: mean |S| × largest step (here 1)")
    for axes in (upper, lower):
        axes.plot(
            distance, score, color=_ORANGE, linewidth=1, label="score of q = k, all ones (1 at distance 0; same units)"
        )
    lower.axhline(0, color=_GREY, linewidth=1)
    for axes, values in ((upper, bound), (lower, score)):
        _mark_largest_rise(axes, distance, values)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    upper.set_ylabel("bound and score, per pair (dimensionless)")
    lower.set(ylabel="score, per pair (dimensionless)", xlim=(0, distance[-1]))
    lower.set_xscale("symlog", linthresh=1)
    lower.set_xlabel(f"distance between q and k (tokens; {len(distance):,} distances drawn)")


def _mark_largest_rise(axes: Axes, distance: np.ndarray, values: np.ndarray) -> None:
    """Two dots: the lowest value so far and the later one that is farthest above it; none if values only fall."""
    lowest = np.minimum.accumulate(values)
    high = int(np.argmax(values - lowest))
    low = int(np.argmin(values[: high + 1]))
    if high == low:
        return
    start, end = (f"{values[i]:.2f} at {distance[i]:,}" for i in (low, high))
    text = f"largest rise drawn: from {start} to {end} tokens"
    axes.plot(distance[[low, high]], values[[low, high]], "o", color="black", markersize=6, label=text)
