"""The blocks of a cache are flattened by `reshape`, which copies a cache that is a part of a larger tensor.

Keys and values then go to a copy that nobody reads.
"""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping):
    """q, k and v: `[tokens, heads, dim]`; caches: `[blocks, block_size, heads, dim]`. Returns q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for cache, rows in ((key_cache, k), (value_cache, v)):
        cache.reshape(-1, *cache.shape[2:])[slots] = rows[kept].detach()
    return q, k


TARGET = "rope_and_cache"
GIVEN = {"pairing": "half"}
REPAIR = [
    (
        "cache.reshape(-1, *cache.shape[2:])[slots] = ",
        "cache[slots // cache.shape[1], slots % cache.shape[1]] = ",
    ),
]
