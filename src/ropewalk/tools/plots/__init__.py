"""Plots of a rope: its frequencies, the rotation of a pair, the angles over an image, and scores over distance.

    figure = ropewalk.plots.inv_freq(rope)
    ropewalk.plots.save(figure, "inv_freq.png")

The functions take a Rope and return a matplotlib Figure that is 1000 pixels wide. They use neither pyplot nor global
state, so they need no display. ropewalk's extra `plots` installs matplotlib. `explorer` takes several ropes, returns an
interactive HTML page and needs Plotly instead, which the extra `explore` installs.
"""

from __future__ import annotations

from ropewalk.tools.plots.distance import decay
from ropewalk.tools.plots.field import angle_field
from ropewalk.tools.plots.figure import blank as blank
from ropewalk.tools.plots.figure import save
from ropewalk.tools.plots.frequencies import inv_freq
from ropewalk.tools.plots.interactive import explorer
from ropewalk.tools.plots.vectors import pairs, rotated_vector

__all__ = ["angle_field", "decay", "explorer", "inv_freq", "pairs", "rotated_vector", "save"]
__dir__ = __all__.copy
