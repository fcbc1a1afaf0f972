"""Flat q and k are reshaped to heads, which copies the parts of a fused qkv, and the copies are rotated in place."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache):
    """query and key: `[tokens, heads · head_size]`, changed in place; the step between tokens may be larger."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    tokens = len(positions)
    for x in (query, key):
        heads = x.reshape(-1, head_size).view(tokens, -1, head_size)
        heads.copy_(turn(heads, cos, sin))


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("x.reshape(-1, head_size).view(tokens, -1, head_size)", "x.unflatten(-1, (-1, head_size))"),
    ("    tokens = len(positions)\n", ""),
]
