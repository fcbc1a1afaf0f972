"""FlashInfer's operator for interleaved pairs of a part of each head."""

import torch

from ropewalk import Rope


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """query and key: `[tokens, heads · head_size]`."""
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    half = cos_sin_cache.shape[-1] // 2
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).split(half, dim=-1)
    for x in (query, key):
        heads = x.unflatten(-1, (-1, head_size))
        if is_neox:
            a, b = heads[..., :half].float(), heads[..., half : 2 * half].float()
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = heads[..., 0 : 2 * half : 2].float(), heads[..., 1 : 2 * half : 2].float()
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        heads[..., : 2 * half].copy_(rotated)


TARGET = "apply_rope_with_cos_sin_cache_inplace"
GIVEN = {"rope": Rope(128, 10000.0, "interleaved", rotary_dim=64)}
