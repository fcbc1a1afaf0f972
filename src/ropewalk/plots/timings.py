"""What `ropewalk bench` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropewalk.plots.figure import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
