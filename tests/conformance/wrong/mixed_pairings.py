"""The tables are for half pairing, but the function pairs neighbours: repeat is used instead of repeat_interleave."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, position_ids):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = position_ids[:, :, None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("torch.cat((angles, angles), dim=-1)", "angles.repeat_interleave(2, dim=-1)"),
]
