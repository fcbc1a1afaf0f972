"""A kernel that refuses positions in int64, behind an adapter."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotary_embedding(positions, q, k, cos_sin_cache):
    """positions: int32 `[tokens]`; q and k: `[tokens, heads, dim]`; cos_sin_cache: `[length, dim]`."""
    if positions.dtype != torch.int32:
        raise TypeError(f"positions must be int32, got {positions.dtype}")
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    return turn(q, cos, sin), turn(k, cos, sin)


def adapter(q, k, positions, cos_sin_cache):
    return rotary_embedding(positions.int(), q, k, cos_sin_cache)


TARGET = "adapter"
GIVEN = {"pairing": "half"}
