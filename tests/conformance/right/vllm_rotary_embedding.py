"""vLLM's operator: flat q and k with a gap between tokens, changed in place without a gradient; k may be missing."""

import torch


@torch.no_grad()
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """query and key: `[tokens, heads · head_size]`; the step between tokens may be larger."""
    half = cos_sin_cache.shape[-1] // 2
    table = cos_sin_cache[positions].to(query.dtype)
    for x in (query, key):
        if x is None:
            continue
        for head in range(x.shape[-1] // head_size):
            channels = x[..., head * head_size : (head + 1) * head_size]
            cos, sin = table[..., :half], table[..., half:]
            first = channels[..., :half] if is_neox else channels[..., 0 : 2 * half : 2]
            second = channels[..., half : 2 * half] if is_neox else channels[..., 1 : 2 * half : 2]
            a, b = first.clone(), second.clone()
            first.copy_(a * cos - b * sin)
            second.copy_(b * cos + a * sin)


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
