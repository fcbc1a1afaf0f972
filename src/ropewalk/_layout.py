"""How q and k lie in memory: layouts, which are orders of axes, and the names of the pairings. Every module asks here.

The letters of a layout's name are its axes: b batch, s or t tokens, h heads, d head_dim. d is the last, and t comes
without b. Another layout is another name in `Layout`, and nothing else. Nothing here imports torch or NumPy. How angles
are rounded has names too.
"""

from __future__ import annotations

from typing import Literal, get_args

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
Pairing = Literal["half", "interleaved"]
Numerics = Literal["exact", "float32", "float32-frequencies"]

Axes = tuple[int | None, int, int, int]
"""Where batch (None: there is none), tokens and heads stand, and how many axes there are; head_dim is the last of them.

A plain tuple, since it is unpacked on the way of every call, and unpacking a subclass takes longer."""


def axes_of(layout: str) -> Axes:
    """The axes that the letters of the name say."""
    tokens = layout.index("s" if "s" in layout else "t")
    return layout.index("b") if "b" in layout else None, tokens, layout.index("h"), len(layout)


AXES: dict[Layout, Axes] = {layout: axes_of(layout) for layout in get_args(Layout)}
