"""Keys and values are stored at the position of the token, which is its slot only in a cache for one sequence."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    kept = slots >= 0
    at = positions[kept] % len(key_cache)
    key_cache[at], value_cache[at] = k[kept].detach(), v[kept].detach()
    return q, k


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("positions[kept] % len(key_cache)", "slots[kept]"),
]
