"""Only the first channel of each pair is written."""

import torch


def apply_rotary_pos_emb(q, k, cos, sin):
    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b), dim=-1)

    return rotated(q), rotated(k)


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("sin[:, None], b)", "sin[:, None], b * cos[:, None] + a * sin[:, None])"),
]
