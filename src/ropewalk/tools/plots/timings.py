"""Plot the results of `ropewalk bench`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropewalk.tools.plots.figure import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def times_copy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the time of each contender of `ropewalk bench`, divided by the time of copying q and k.

    Args:
        rows: `rows` of the JSON file of the benchmark. Rows without times, and those in new memory, are omitted.

    Returns:
        A Figure with one panel for each dtype and each of forward and forward + backward. A panel shows the median
        time, divided by the median time of `copy_` (dimensionless, log axis), over the number of tokens (log axis).

    Raises:
        RopeError: matplotlib is not installed.
    """
    timed = [row for row in rows if row["state"] == "timed" and row["memory"] != "new"]
    panels = list(dict.fromkeys((row["dtype"], row["backward"]) for row in timed)) or [("", False)]
    names = list(dict.fromkeys(row["contender"] for row in timed))
    columns = min(2, len(panels))
    panel_rows = math.ceil(len(panels) / columns)
    figure = blank(height=4.0 * panel_rows + 2.0)
    line_of_name = {}
    grid = figure.subplots(panel_rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        for i, name in enumerate(names):
            selected = [row for row in timed if (row["dtype"], row["backward"], row["contender"]) == (*panel, name)]
            points = sorted((row["tokens"], row["times_copy"]) for row in selected)
            if points:
                style = {"color": f"C{i % 10}", "marker": "o" if i < 10 else "s", "markersize": 4}
                (line_of_name[name],) = axes.loglog(
                    *zip(*points, strict=True), linestyle="-" if i < 10 else "--", **style
                )
        passes = "forward + backward" if panel[1] else "forward"
        axes.set(xlabel="tokens", ylabel="time over time of copy_ (dimensionless)", title=f"{panel[0]}, {passes}")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.legend(list(line_of_name.values()), list(line_of_name), loc="outside lower center", ncols=4)
    return figure
