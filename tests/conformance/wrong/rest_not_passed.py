"""The channels that are not rotated are returned as zeros."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.dim, self.base = head_dim // 2, base

    def forward(self, x, positions):
        x = x.clone()
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x[..., : self.dim].float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        out = torch.zeros_like(x)
        out[..., : self.dim] = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)
        return out


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("torch.zeros_like(x)", "x.clone()"),
]
