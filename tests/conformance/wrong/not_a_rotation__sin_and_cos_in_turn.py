"""NVIDIA/ngpt#10: the table has sin and cos in turn, and the function that takes it splits it into halves."""

import torch


def table(n_positions, dim, base=10000.0):
    inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(n_positions).float()[:, None] * inv_freq
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def apply(sinusoidal, q, k):
    """q and k: `[batch, heads, seq, dim]`."""
    sin, cos = sinusoidal.chunk(2, dim=-1)

    def turn(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)

    return turn(q), turn(k)


TARGET = "table,apply"
GIVEN = {"layout": "bhsd"}
REPAIR = [
    ("torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)", "torch.cat((angles.sin(), angles.cos()), dim=-1)"),
]
