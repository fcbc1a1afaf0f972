"""Convert cos and sin to the formats that functions expect: repeated columns, one or two tensors, additional axes."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Width = Literal[
    "halves",
    "twice",
    "half",
    "complex",
    "angles",
    "angles in halves",
    "angles twice",
    "cos, sin stacked",
    "sin, cos in halves",
    "cos, sin in halves",
    "sin, cos twice",
    "cos, sin twice",
    "sin, cos",
    "cos, sin",
]
"""How cos and sin of the pairs are stored.

"halves" repeats all columns, "twice" repeats each column, and "half" has one column for each pair. The first three are
two tensors, and the others are one: complex numbers, angles, or cos and sin stacked or concatenated in the named order.
"""

PAIRED: tuple[Width, ...] = ("halves", "twice", "half")
SINGLE: tuple[Width, ...] = get_args(Width)[3:]

Axes = Literal["bs", "b1s", "bs1", "sb1", "s"]
"""The axes before the columns: b is batch, s is seq, and 1 is an axis of size 1 for the heads."""

BATCHED: tuple[Axes, ...] = get_args(Axes)[:-1]
"""The axes that include batch."""


def format_tables(cos: Tensor, sin: Tensor, angles: Tensor, width: Width) -> tuple[Tensor, ...]:
    """Convert cos, sin and angles, all `[..., pairs]`, to a format.

    Returns:
        cos and sin, or one tensor, as `width` determines.
    """
    if width in PAIRED:
        return _repeat_columns(cos, width), _repeat_columns(sin, width)
    if width == "complex":
        return (torch.complex(cos.float(), sin.float()),)
    if width == "cos, sin stacked":
        return (torch.stack((cos, sin), dim=-1),)
    if width.startswith("angles"):
        return (_repeat_columns(angles, width),)
    both = (sin, cos) if width.startswith("sin") else (cos, sin)
    return (torch.cat([_repeat_columns(t, width) for t in both], dim=-1),)


def with_axes(table: Tensor, axes: Axes) -> Tensor:
    """Convert a table `[batch, seq, ...]` to one whose axes before the columns are `axes`."""
    if axes == "s":
        return table[0]
    if axes == "sb1":
        return table.transpose(0, 1).unsqueeze(2)
    return {"bs": table, "b1s": table.unsqueeze(1), "bs1": table.unsqueeze(2)}[axes]


def _repeat_columns(t: Tensor, width: Width) -> Tensor:
    """Repeat the columns of t `[..., pairs]` for a format whose name ends in "halves" or "twice". Else return t."""
    if width.endswith("halves"):
        return torch.cat((t, t), dim=-1)
    return t.repeat_interleave(2, dim=-1) if width.endswith("twice") else t
