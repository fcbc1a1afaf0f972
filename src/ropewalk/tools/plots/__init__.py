"""Plots of a rope: its frequencies, the rotation of a pair, the angles over an image, and scores over distance.

    figure = ropewalk.plots.inv_freq(rope)
    ropewalk.plots.save(figure, "inv_freq.png")

Most functions take a Rope and return a matplotlib Figure that is 1000 pixels wide. `differences` takes several ropes,
and `times_copy` takes the rows of a benchmark. The functions use neither pyplot nor global state, so they need no
display. ropewalk's extra `plots` installs matplotlib. `explorer` returns an interactive HTML page and needs Plotly
instead, which the extra `explore` installs.
"""

from __future__ import annotations

from ropewalk.tools.plots.differences import differences as differences
from ropewalk.tools.plots.distance import decay as decay
from ropewalk.tools.plots.field import angle_field as angle_field
from ropewalk.tools.plots.figure import FORMATS as FORMATS
from ropewalk.tools.plots.figure import blank as blank
from ropewalk.tools.plots.figure import check_path as check_path
from ropewalk.tools.plots.figure import save as save
from ropewalk.tools.plots.frequencies import inv_freq as inv_freq
from ropewalk.tools.plots.interactive import explorer as explorer
from ropewalk.tools.plots.timings import times_copy as times_copy
from ropewalk.tools.plots.vectors import pairs as pairs
from ropewalk.tools.plots.vectors import rotated_vector as rotated_vector
