"""AITER 3492: the step from block to block is computed from the sizes, but the cache is one half of a larger tensor.

Keys and values lie behind each other in each block: `[blocks, 2, block_size, heads, dim]`, split by `unbind(1)`. The
second block of keys is written where the values of the first block are.
"""

import torch


def store(cache, slots, rows):
    """Write rows `[tokens, heads, dim]` to their slots of cache `[blocks, block_size, heads, dim]`."""
    _, block_size, heads, dim = cache.shape
    step = block_size * heads * dim
    length = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    memory = cache.as_strided((length,), (1,))
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            at = slot // block_size * step + slot % block_size * heads * dim
            memory[at : at + heads * dim] = row.flatten()


def fused_rope_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping):
    """q, k and v: `[tokens, heads, dim]`. Returns the rotated q and k, and stores k and v."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def rotated(x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    q, k = rotated(q), rotated(k)
    store(key_cache, slot_mapping, k.detach())
    store(value_cache, slot_mapping, v.detach())
    return q, k


TARGET = "fused_rope_cache"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("step = block_size * heads * dim", "step = cache.stride(0)"),
]
