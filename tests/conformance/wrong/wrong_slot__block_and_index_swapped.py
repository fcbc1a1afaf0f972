"""The slot is divided by the number of blocks instead of the size of a block."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def store(cache, rows, slots):
    """Write rows `[tokens, heads, dim]` to their slots of cache `[blocks, block_size, heads, dim]`."""
    blocks, block_size = cache.shape[:2]
    kept = slots >= 0
    slots, rows = slots[kept], rows[kept].detach()
    cache[slots % blocks, slots // blocks % block_size] = rows


def rope_and_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping):
    """q, k and v: `[tokens, heads, dim]`. Returns the rotated q and k, and stores k and v."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    store(key_cache, k, slot_mapping)
    store(value_cache, v, slot_mapping)
    return q, k


TARGET = "rope_and_cache"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("slots % blocks, slots // blocks % block_size", "slots // block_size, slots % block_size"),
]
