"""The halves are exchanged without a sign, and sin comes before cos. The first pairs are those of an axis at 0."""

import torch


def tables(seq_len):
    """Return sin and cos `[seq_len, 64]`, of a grid with one row."""
    columns = torch.outer(torch.arange(seq_len), 100.0 ** (-torch.arange(16) / 16))
    angles = torch.cat((torch.zeros_like(columns), columns), dim=-1).tile(2)
    return angles.sin(), angles.cos()


def rope_apply(x, sin, cos):
    """x: `[batch, heads, seq, 64]`."""
    a, b = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((b, a), dim=-1) * sin).type_as(x)


TARGET = "tables,rope_apply"
GIVEN = {}
REPAIR = [
    ("torch.cat((b, a), dim=-1)", "torch.cat((-b, a), dim=-1)"),
]
