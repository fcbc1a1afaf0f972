"""A fused call rotates the heads of q and one head after them, as if k always had one head."""

import torch


def rotate(qkv, cos, sin, num_heads, num_kv_heads):
    """qkv: `[batch, seq, heads, head_dim]`; cos and sin: `[batch, seq, head_dim / 2]`."""
    rotated = num_heads + 1
    a, b = qkv[:, :, :rotated].chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(qkv)
    return torch.cat((turned, qkv[:, :, rotated:]), dim=2)


TARGET = "rotate"
GIVEN = {}
REPAIR = [
    ("num_heads + 1", "num_heads + num_kv_heads"),
]
