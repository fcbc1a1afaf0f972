"""The keys go to their slots, but the values are written to the first slots in the order of the tokens."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot] = k[token].detach()
            value_cache[token] = v[token].detach()
    return q, k


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("value_cache[token] = v", "value_cache[slot] = v"),
]
