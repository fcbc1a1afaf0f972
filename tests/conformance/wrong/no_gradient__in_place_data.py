"""The rotation writes to the `data` of q and k, which autograd does not see."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_qkv(qkv, num_heads, num_kv_heads, cos, sin):
    """qkv: `[batch, seq, num_heads + 2 · num_kv_heads, dim]`, in place; cos and sin: `[batch, seq, dim / 2]`."""
    heads = qkv.data[:, :, : num_heads + num_kv_heads]
    heads.copy_(turn(heads, cos[:, :, None], sin[:, :, None]))


TARGET = "rotate_qkv"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("qkv.data[:, :,", "qkv[:, :,"),
]
