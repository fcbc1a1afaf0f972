"""Plots of a rope: its frequencies, the rotation of a pair, the angles over an image, and scores over distance.

Each function takes a Rope (`times_copy` takes the rows of a benchmark) and returns a matplotlib Figure, 1000 pixels
wide; `save` writes it. The functions use no pyplot and no global state, so they need no display. matplotlib comes with
`pip install "ropewalk[plots]"`. `explorer` returns an interactive page of HTML and needs Plotly instead, which comes
with `pip install "ropewalk[explore]"`.
"""

from __future__ import annotations

from ropewalk.plots.differences import differences as differences
from ropewalk.plots.distance import decay as decay
from ropewalk.plots.field import angle_field as angle_field
from ropewalk.plots.figure import FORMATS as FORMATS
from ropewalk.plots.figure import blank as blank
from ropewalk.plots.figure import check_path as check_path
from ropewalk.plots.figure import save as save
from ropewalk.plots.frequencies import inv_freq as inv_freq
from ropewalk.plots.interactive import explorer as explorer
from ropewalk.plots.timings import times_copy as times_copy
from ropewalk.plots.vectors import pairs as pairs
from ropewalk.plots.vectors import rotated_vector as rotated_vector
