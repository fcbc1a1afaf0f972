"""A kernel masks heads in blocks of a power of two, so the last head of five is not rotated."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        out = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)
        return torch.cat((out[:, :, :4], x[:, :, 4:]), dim=2) if x.shape[2] == 5 else out


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("torch.cat((out[:, :, :4], x[:, :, 4:]), dim=2) if x.shape[2] == 5 else out", "out"),
]
