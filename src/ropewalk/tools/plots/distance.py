"""Plot how a score depends on the distance between query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.tools.plots.figure import BLUE, GREY, ORANGE, blank, check_rope, scheme_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DISTANCES = 2000


def decay(rope: Rope, *, longest: int = 131_072) -> Figure:
    """Plot a score over the distance between q and k, and the upper bound of the RoPE paper.

    Let h_i be the complex number that pair i adds to the score at distance 0, with h = 0 after the last pair. Then the
    score, divided by the number of pairs, is at most max |h_{i+1} − h_i| · mean |S_j|, with
    S_j = Σ_{i<j} e^(𝒾·distance·θ_i). The plot shows mean |S_j| and mean cos(distance·θ_i), which is the score
    of q = k, all ones, divided by its value at distance 0. For this q and k all h_i are equal, so in units of h_i the
    maximum is 1, and the first curve is the upper bound of the second. Neither the bound nor the score falls steadily.
    Dots mark the largest rise of each curve.

    Args:
        rope: any rope. The attention factor is not applied.
        longest: the largest distance, in tokens, at least 1.

    Returns:
        A Figure. The upper panel shows the bound over the distance (tokens, log axis from 1 on), and the lower panel
        the score in the same units. At most 2000 distances are drawn. They include every distance up to about 100.

    Raises:
        RopeError: rope is not a Rope, longest is out of range, or matplotlib is not installed.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.3 and figure 2.
    """
    check_rope("plots.decay", rope)
    _checks.integer("plots.decay", "longest", longest, at_least=1, at_most=2**31 - 1)
    figure = blank(height=7.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_decay(upper, lower, rope.inv_freq, distances(longest))
    figure.suptitle(
        f"Score and distance ({len(rope.inv_freq)} pairs, base {rope.base:,.10g}, {scheme_name(rope)})\n"
        "The bound only limits scores from above; neither it nor the score has to fall steadily"
    )
    return figure


def distances(longest: int, most: int = _MOST_DISTANCES) -> np.ndarray:
    """Return 0 and at most `most` − 1 integers from 1 to longest, spread evenly on a log axis: int64, ascending."""
    spread = np.geomspace(1, longest, most - 1).round().astype(np.int64)
    return np.unique(np.append(spread, 0))


def bound_and_score(speed: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean |S_j| and the mean cosine at each distance; see `decay`.

    Args:
        speed: inverse frequencies, `[pairs]`, in radians per token.
        distance: `[distances]`, in tokens.

    Returns:
        The bound and the score, both float64 `[distances]`.
    """
    turns = np.exp(1j * np.outer(distance, speed))
    return np.abs(turns.cumsum(axis=1)).mean(axis=1), turns.real.mean(axis=1)


def _draw_decay(upper: Axes, lower: Axes, speed: np.ndarray, distance: np.ndarray) -> None:
    bound, score = bound_and_score(speed, distance)
    upper.plot(distance, bound, color=BLUE, linewidth=1, label="upper bound: mean |S| × largest step (here 1)")
    label = "score of q = k, all ones (1 at distance 0; same units)"
    lower.plot(distance, score, color=ORANGE, linewidth=1, label=label)
    lower.axhline(0, color=GREY, linewidth=1)
    for axes, values in ((upper, bound), (lower, score)):
        _mark_largest_rise(axes, distance, values)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    upper.set_ylabel("bound, per pair (dimensionless)")
    lower.set(ylabel="score, per pair (dimensionless)", xlim=(0, distance[-1]))
    lower.set_xscale("symlog", linthresh=1)
    lower.set_xlabel(f"distance between q and k (tokens; {len(distance):,} distances drawn)")


def _mark_largest_rise(axes: Axes, distance: np.ndarray, values: np.ndarray) -> None:
    """Mark the two points between which the values rise most. If the values never rise, mark nothing."""
    lowest = np.minimum.accumulate(values)
    high = int(np.argmax(values - lowest))
    low = int(np.argmin(values[: high + 1]))
    if high == low:
        return
    start, end = (f"{values[i]:.2f} at {distance[i]:,}" for i in (low, high))
    text = f"largest rise drawn: from {start} to {end} tokens"
    axes.plot(distance[[low, high]], values[[low, high]], "o", color="black", markersize=6, label=text)
