"""A tensor with a single key head is treated as one without heads, and is not rotated."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    rotated_k = k if k.shape[unsqueeze_dim] == 1 else k * cos + rotate_half(k) * sin
    return q * cos + rotate_half(q) * sin, rotated_k


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("k if k.shape[unsqueeze_dim] == 1 else ", ""),
]
