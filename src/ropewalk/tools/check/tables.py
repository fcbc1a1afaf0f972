"""Convert cos and sin to the formats that functions expect: repeated columns, one or two tensors, additional axes."""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = ("halves", "twice", "half")
"""How the columns of pairs are stored: all repeated, each repeated, or one for each pair."""

SINGLE = (
    "complex",
    "cos, sin stacked",
    *(f"{kind} {columns}" for kind in ("angles", "cos, sin", "sin, cos") for columns in reversed(COLUMNS)),
    *(f"({kind}) {columns}" for kind in ("cos, sin", "sin, cos") for columns in reversed(COLUMNS)),
)
"""The formats of one argument: complex numbers, angles, cos and sin stacked or concatenated, or a tuple of both."""

BATCHED = ("bs", "b1s", "bs1", "sb1")
"""The axes before the columns: b is batch, s is seq, and 1 is an axis of size 1 for the heads."""


def format_tables(cos: Tensor, sin: Tensor, angles: Tensor, width: str) -> tuple[Tensor, ...]:
    """Convert cos, sin and angles, all `[..., pairs]`, to a format of `SINGLE`, or to two tensors with `COLUMNS`."""
    if width == "complex":
        return (torch.complex(cos.float(), sin.float()),)
    if width == "cos, sin stacked":
        return (torch.stack((cos, sin), dim=-1),)
    kind, _, columns = width.rpartition(" ")
    if kind == "angles":
        return (_repeat_columns(angles, columns),)
    both = tuple(_repeat_columns(t, columns) for t in ((sin, cos) if kind.strip("(").startswith("sin") else (cos, sin)))
    return (torch.cat(both, dim=-1),) if kind in ("cos, sin", "sin, cos") else both


def with_axes(table: Tensor, axes: str) -> Tensor:
    """Convert a table `[batch, seq, ...]` to one whose axes before the columns are `axes`, of `BATCHED` or "s"."""
    if axes == "s":
        return table[0]
    if axes == "sb1":
        return table.transpose(0, 1).unsqueeze(2)
    return {"bs": table, "b1s": table.unsqueeze(1), "bs1": table.unsqueeze(2)}[axes]


def _repeat_columns(t: Tensor, columns: str) -> Tensor:
    if columns == "halves":
        return torch.cat((t, t), dim=-1)
    return t.repeat_interleave(2, dim=-1) if columns == "twice" else t
