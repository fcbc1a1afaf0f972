"""cos and sin as functions want them: how columns repeat, which axes there are, which parameter takes what."""

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
"""How tables are written: each half of the columns the same, each column twice, one for each pair; or in one tensor."""

PAIRED: tuple[Width, ...] = ("halves", "twice", "half")
SINGLE: tuple[Width, ...] = get_args(Width)[3:]

Axes = Literal["bs", "b1s", "bs1", "sb1", "s"]
"""Axes before the columns: batch and seq, with 1 where heads stand, or seq alone."""

OF_ROWS: tuple[Axes, ...] = get_args(Axes)[:-1]
"""Those with an axis for the rows of a batch."""


def written(cos: Tensor, sin: Tensor, angles: Tensor, width: Width) -> tuple[Tensor, ...]:
    """`[..., pairs]` → cos and sin, or the one tensor, in this width."""
    if width in PAIRED:
        return _wide(cos, width), _wide(sin, width)
    if width == "complex":
        return (torch.complex(cos.float(), sin.float()),)
    if width == "cos, sin stacked":
        return (torch.stack((cos, sin), dim=-1),)
    if width.startswith("angles"):
        return (_wide(angles, width),)
    both = (sin, cos) if width.startswith("sin") else (cos, sin)
    return (torch.cat([_wide(t, width) for t in both], dim=-1),)


def with_axes(table: Tensor, axes: Axes) -> Tensor:
    """`[batch, seq, ...]` → these axes."""
    if axes == "s":
        return table[0]
    if axes == "sb1":
        return table.transpose(0, 1).unsqueeze(2)
    return {"bs": table, "b1s": table.unsqueeze(1), "bs1": table.unsqueeze(2)}[axes]


def _wide(t: Tensor, width: Width) -> Tensor:
    """One column for each pair → the columns that the name of the width ends with."""
    if width.endswith("halves"):
        return torch.cat((t, t), dim=-1)
    return t.repeat_interleave(2, dim=-1) if width.endswith("twice") else t
