"""A helper returns a detached tensor, so the part of the gradient that flows through sin is missing."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1).detach()


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    (".detach()", ""),
]
