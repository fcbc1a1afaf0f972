"""The result is bfloat16 for every dtype of q and k."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_out, k_out = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    return q_out.bfloat16(), k_out.bfloat16()


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("q_out.bfloat16(), k_out.bfloat16()", "q_out, k_out"),
]
