"""Positions past the end of the table start again at its first row."""

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
        rows = positions % self.cos.shape[0]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[rows][:, :, None].float(), self.sin[rows][:, :, None].float()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("positions % self.cos.shape[0]", "positions"),
]
