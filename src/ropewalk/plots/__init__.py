"""Pictures of a rope: how fast its pairs turn, what a turn looks like, an image too, and what distance does to a score.

Each function takes a Rope (`times_copy` a benchmark's rows) and returns a matplotlib Figure, 1000 pixels wide; `save`
writes it. No pyplot and no global state, so no display is needed. matplotlib comes with
`pip install "ropewalk[plots]"`.
"""

from __future__ import annotations

from ropewalk.plots.differences import differences as differences
from ropewalk.plots.distance import decay as decay
from ropewalk.plots.field import angle_field as angle_field
from ropewalk.plots.figure import FORMATS as FORMATS
from ropewalk.plots.figure import blank as blank
from ropewalk.plots.figure import check_path as check_path
from ropewalk.plots.figure import save as save
from ropewalk.plots.speed import inv_freq as inv_freq
from ropewalk.plots.timings import times_copy as times_copy
from ropewalk.plots.turns import pairs as pairs
from ropewalk.plots.turns import rotated_vector as rotated_vector
