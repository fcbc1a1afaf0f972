"""The function of transformers until 4.36 alone, which indexes its tables by the positions."""

import torch


def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos[position_ids][:, None] + torch.cat((-b, a), dim=-1) * sin[position_ids][:, None]

    return rotated(q), rotated(k)


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
