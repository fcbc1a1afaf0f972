"""The tables have an axis for the rows of the batch, but are computed only for the first row of positions."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, x, position_ids):
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = position_ids[:1, :, None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("position_ids[:1, :, None]", "position_ids[:, :, None]"),
]
