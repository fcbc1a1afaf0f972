"""The result is float32 for every dtype of q and k."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    (
        "    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin",
        "    return (q * cos + rotate_half(q) * sin).to(dtype), (k * cos + rotate_half(k) * sin).to(dtype)",
    ),
    ("    q, k = q.float(), k.float()\n", "    dtype, q, k = q.dtype, q.float(), k.float()\n"),
]
