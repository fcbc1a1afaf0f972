"""The tables are for interleaved pairing, but the function pairs the halves."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, position_ids):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = (position_ids[:, :, None].float() * inv_freq).repeat_interleave(2, dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    (
        "(position_ids[:, :, None].float() * inv_freq).repeat_interleave(2, dim=-1)",
        "torch.cat([position_ids[:, :, None].float() * inv_freq] * 2, dim=-1)",
    ),
]
