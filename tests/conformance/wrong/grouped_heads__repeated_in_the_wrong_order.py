"""The key heads are repeated to the number of query heads with repeat instead of repeat_interleave."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("    k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1)\n", ""),
]
