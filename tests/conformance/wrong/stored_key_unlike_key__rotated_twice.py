"""k is rotated in place, and the function that stores it rotates it again."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`, q and k changed in place; caches: `[slots, heads, dim]`."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q.copy_(turn(q, cos, sin))
    k.copy_(turn(k, cos, sin))
    kept = slots >= 0
    key_cache[slots[kept]] = turn(k, cos, sin)[kept].detach()
    value_cache[slots[kept]] = v[kept].detach()


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("turn(k, cos, sin)[kept].detach()", "k[kept].detach()"),
]
