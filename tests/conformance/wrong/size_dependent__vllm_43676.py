"""vLLM 43676: the width of the table is not passed on, so the kernel takes it for the size of the head.

With fewer rotated channels than channels, every head is rotated whole, with angles from the next row of the table.
"""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """query and key: `[tokens, heads · head_size]`, changed in place."""
    rotary_dim, width = head_size, cos_sin_cache.shape[1]
    half = rotary_dim // 2
    memory = torch.nn.functional.pad(cos_sin_cache.flatten(), (0, head_size))
    start = positions[:, None] * width + torch.arange(half)
    cos, sin = memory[start][:, None], memory[start + half][:, None]
    for x in (query, key):
        heads = x.view(len(positions), -1, head_size)
        if is_neox:
            first, second = heads[..., :half], heads[..., half:rotary_dim]
        else:
            first, second = heads[..., 0:rotary_dim:2], heads[..., 1:rotary_dim:2]
        a, b = first.clone(), second.clone()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("rotary_dim, width = head_size, cos_sin_cache.shape[1]", "rotary_dim = width = cos_sin_cache.shape[1]"),
]
