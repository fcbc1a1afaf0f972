"""In its own layout, bshd, the tables of several rows are repeated in the order of sbhd, in which the code is right."""

import torch


def rotate(x, cos, sin):
    """x: `[batch, seq, heads, dim]`, cos and sin: `[seq, dim / 2]`."""
    tokens = x.flatten(0, 1)
    rows = len(tokens) // len(cos)
    cos, sin = (table.repeat_interleave(rows, dim=0)[:, None] for table in (cos, sin))
    a, b = tokens.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).view_as(x)


TARGET = "rotate"
GIVEN = {}
REPAIR = [
    ("table.repeat_interleave(rows, dim=0)", "table.repeat(rows, 1)"),
]
