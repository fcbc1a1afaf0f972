"""Positions in int32 are read as if they were int64."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, positions, cos_sin_cache):
    """q and k: `[tokens, heads, dim]`; cos_sin_cache: `[length, dim]`."""
    if positions.dtype == torch.int32:
        positions = torch.cat((positions, positions)).view(torch.int64)[: len(positions)] % len(cos_sin_cache)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    return turn(q, cos, sin), turn(k, cos, sin)


TARGET = "rope"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("torch.cat((positions, positions)).view(torch.int64)[: len(positions)] % len(cos_sin_cache)", "positions.long()"),
]
