"""Rows are stored in blocks of 64 channels, so a row of 80 channels also writes the start of the next slot."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def store(cache, rows, slots):
    """Write rows `[tokens, heads, dim]` to their slots of cache `[slots, heads, dim]`, in blocks of 64 channels."""
    length = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    memory = cache.as_strided((length,), (1,))
    size = rows[0].numel()
    for slot, row in zip(slots.tolist(), rows.detach().flatten(1), strict=True):
        if slot >= 0:
            padded = torch.nn.functional.pad(row, (0, -size % 64))
            start = slot * cache.stride(0)
            end = min(start + len(padded), len(memory))
            memory[start:end] = padded[: end - start]


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    store(key_cache, k, slots)
    store(value_cache, v, slots)
    return q, k


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("(0, -size % 64)", "(0, 0)"),
]
