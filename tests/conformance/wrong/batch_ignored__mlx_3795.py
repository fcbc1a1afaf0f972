"""MLX 3795: for a single token the grid leaves out the first axis, so only the first row of the batch is rotated."""

import torch


def rope(x, cos, sin):
    """x: `[batch, heads, seq, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    rows = 1 if x.shape[2] == 1 else len(x)
    cos, sin = cos[:rows, None], sin[:rows, None]
    a, b = x[:rows].chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated, x[rows:]))


TARGET = "rope"
GIVEN = {"pairing": "half", "layout": "bhsd"}
REPAIR = [
    ("1 if x.shape[2] == 1 else len(x)", "len(x)"),
]
