"""Plot several ropes in one figure, to compare engines, or a model with its fine-tune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ropewalk import Rope, _checks
from ropewalk.tools.plots.distance import distances
from ropewalk.tools.plots.figure import GREY, blank, colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WHO = "plots.differences"


def differences(ropes: Mapping[str, Rope], *, longest: int = 131_072) -> Figure:
    """Plot frequencies relative to those of the first rope, and the score over distance for each rope.

    Args:
        ropes: a dict from names to static ropes. There must be at least one rope, and all must have the same number of
            pairs. Equal ropes share one line, whose label has all of their names.
        longest: the largest distance, in tokens, at least 1.

    Returns:
        A Figure. The upper panel shows the inverse frequency of each pair, divided by that of the first rope, over the
        pair index (log axis). Pairs that do not rotate are omitted. The lower panel shows the score of q = k, all ones,
        relative to its value at distance 0 without the attention factor: attention_factor² · mean cos(distance · θ_i)
        with the inverse frequencies θ_i, at up to 2000 distances (tokens, log axis from 1 on).

    Raises:
        RopeError: there is no rope, the numbers of pairs differ, a rope depends on the length, longest is out of range,
            or matplotlib is not installed.
    """
    _checks.integer(_WHO, "longest", longest, at_least=1, at_most=2**31 - 1)
    names_of: dict[Rope, list[str]] = {}
    for name, rope in ropes.items():
        names_of.setdefault(rope, []).append(name)
    if len({len(rope.inv_freq) for rope in names_of}) != 1:
        got = f"{[len(rope.inv_freq) for rope in names_of]} pairs" if names_of else "none"
        raise _checks.error(
            _WHO, "ropes must be one or more ropes with the same number of pairs", got, "Plot them separately."
        )
    figure = blank(height=7.5)
    upper, lower = figure.subplots(2, 1)
    first, distance = next(iter(names_of)).inv_freq, distances(longest)
    markers = "osv^D<>"
    for i, (colour, (rope, names)) in enumerate(zip(colours(len(names_of)), names_of.items(), strict=True)):
        speed, label = rope.inv_freq, ", ".join(names)
        rotating = (first > 0) & (speed > 0)
        index = np.flatnonzero(rotating)
        style = {"color": colour, "marker": markers[i % len(markers)], "markersize": 4, "linewidth": 1}
        upper.plot(index, speed[rotating] / first[rotating], label=label, **style)
        score = rope.attention_factor**2 * np.cos(np.outer(distance, speed)).mean(axis=1)
        lower.plot(distance, score, color=colour, linewidth=1, label=label)
    upper.set_yscale("log")
    upper.set(xlabel="pair index (0 is the fastest)", ylabel=f"inverse frequency / that of {next(iter(ropes))}")
    upper.locator_params(axis="x", integer=True)
    lower.axhline(0, color=GREY, linewidth=1)
    lower.set(ylabel="score of q = k, all ones, per pair", xlim=(0, longest))
    lower.set_xscale("symlog", linthresh=1)
    lower.set_xlabel(f"distance between q and k (tokens; {len(distance):,} distances drawn)")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    count = len(names_of)
    title = "All have the same numbers" if count == 1 else f"{count} different ropes among {len(ropes)}"
    figure.suptitle(f"{title}, distances up to {longest:,} tokens")
    return figure
