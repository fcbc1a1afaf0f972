"""The fused kernel rotates as many heads of keys as of queries, and so the values if there are fewer keys."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_qkv(qkv, num_heads, num_kv_heads, cos, sin):
    """qkv: `[batch, seq, num_heads + 2 · num_kv_heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    rotated = num_heads + num_heads
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((turn(qkv[:, :, :rotated], cos, sin), qkv[:, :, rotated:]), dim=2)


TARGET = "rotate_qkv"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("rotated = num_heads + num_heads", "rotated = num_heads + num_kv_heads"),
]
