"""The result is rotated a second time, as if both the model and its attention rotated."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    for _ in range(2):
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    return q, k


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("range(2)", "range(1)"),
]
