"""Two heads are rotated at a time. With an odd number of heads of q and k the last pair takes a head of v."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_qkv(qkv, num_heads, num_kv_heads, cos, sin):
    """qkv: `[batch, seq, num_heads + 2 · num_kv_heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    out = qkv.clone()
    for head in range(0, num_heads + num_kv_heads, 2):
        end = head + 2
        out[:, :, head:end] = turn(qkv[:, :, head:end], cos, sin)
    return out


TARGET = "rotate_qkv"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("end = head + 2", "end = min(head + 2, num_heads + num_kv_heads)"),
]
