"""The rotation overwrites q and k."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_other, k_other = rotate_half(q) * sin, rotate_half(k) * sin
    return q.detach().mul_(cos) + q_other, k.detach().mul_(cos) + k_other


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("q.detach().mul_(cos)", "q * cos"),
    ("k.detach().mul_(cos)", "k * cos"),
]
