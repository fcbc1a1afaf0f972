"""Rotation and the write to a paged cache of any strides in one call. Tokens with the slot -1 are not stored."""

import torch


def rope_and_paged_cache(query, key, value, positions, cos_sin_cache, key_cache, value_cache, slot_mapping, is_neox):
    """query, key and value: `[tokens, heads, dim]`; caches: `[blocks, block_size, heads, dim]`. Returns q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    half = cos.shape[-1]

    def rotated(x):
        head, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
        a, b = head.chunk(2, dim=-1) if is_neox else (head[..., ::2], head[..., 1::2])
        first, second = a * cos - b * sin, b * cos + a * sin
        out = torch.cat((first, second), dim=-1) if is_neox else torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((out.type_as(x), rest), dim=-1)

    query, key = rotated(query), rotated(key)
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token].detach().to(key_cache.dtype)
            value_cache[slot // block_size, slot % block_size] = value[token].detach().to(value_cache.dtype)
    return query, key


TARGET = "rope_and_paged_cache"
GIVEN = {"pairing": "half"}
BUGS = {
    # The blocks of a cache are flattened by `reshape`, which copies a cache that is a part of a larger tensor. Keys and
    # values then go to a copy that nobody reads.
    "cache_not_written__reshape_copies": [
        ("key_cache[slot // block_size, slot % block_size]", "key_cache.reshape(-1, *key_cache.shape[2:])[slot]"),
        ("value_cache[slot // block_size, slot % block_size]", "value_cache.reshape(-1, *value_cache.shape[2:])[slot]"),
    ],
    # The slot is divided by the number of blocks instead of the size of a block.
    "wrong_slot__block_and_index_swapped": [
        ("block_size = key_cache.shape[1]", "blocks, block_size = key_cache.shape[:2]"),
        ("key_cache[slot // block_size, slot % block_size]", "key_cache[slot % blocks, slot // blocks % block_size]"),
        (
            "value_cache[slot // block_size, slot % block_size]",
            "value_cache[slot % blocks, slot // blocks % block_size]",
        ),
    ],
}
