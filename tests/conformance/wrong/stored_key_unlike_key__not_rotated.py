"""The key is stored before it is rotated."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    kept = slots >= 0
    rotated = turn(k, cos, sin)
    key_cache[slots[kept]] = k[kept].detach()
    value_cache[slots[kept]] = v[kept].detach()
    return turn(q, cos, sin), rotated


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("key_cache[slots[kept]] = k[kept]", "key_cache[slots[kept]] = rotated[kept]"),
]
