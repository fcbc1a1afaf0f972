"""Tokens past the end of the table are not rotated."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, max_positions=2048, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        inv_freq = self.base ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(max_positions)[:, None].float() * inv_freq
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, positions):
        rows = positions.clamp(max=self.cos.shape[0] - 1)
        inside = (positions < self.cos.shape[0])[:, :, None, None]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos = torch.where(inside, self.cos[rows][:, :, None], 1.0)
        sin = torch.where(inside, self.sin[rows][:, :, None], 0.0)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("positions.clamp(max=self.cos.shape[0] - 1)", "positions"),
]
