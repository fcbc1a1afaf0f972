"""The fused result is split with the number of key heads first, so a part of q is returned as k."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_qkv(qkv, num_heads, num_kv_heads, head_size, cos_sin_cache, positions):
    """qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_size]`. Returns q, k and v `[tokens, heads, head_size]`."""
    heads = qkv.unflatten(-1, (-1, head_size))
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    rotated = turn(heads[:, : num_heads + num_kv_heads], cos, sin)
    q, k = rotated[:, :num_heads], rotated[:, :num_kv_heads]
    return q, k, heads[:, num_heads + num_kv_heads :]


TARGET = "rotate_qkv"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("rotated[:, :num_kv_heads]", "rotated[:, num_heads:]"),
]
