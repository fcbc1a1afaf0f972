"""The column of a patch is never read. The positions are [tokens, 2], and one for each token raises nothing."""

import torch


def rope_of_patches(x, positions):
    """x: `[batch, heads, tokens, head_dim]`; positions: `[tokens, 2]`, the row and the column."""
    periods = 100.0 ** (torch.arange(0, 32, 2) / 32)
    rows, columns = positions[:, 0:1] / periods, positions[:, 0:1] / periods
    angles = torch.cat((rows, columns), dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


TARGET = "rope_of_patches"
GIVEN = {}
REPAIR = [
    ("periods, positions[:, 0:1]", "periods, positions[:, 1:2]"),
]
