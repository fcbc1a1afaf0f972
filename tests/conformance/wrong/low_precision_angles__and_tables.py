"""Frequencies, angles and tables are in bfloat16."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
        angles = (torch.arange(4096)[:, None].float() * inv_freq.bfloat16().float()).bfloat16()
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x, positions):
        cos, sin = self.cos[positions][:, :, None].float(), self.sin[positions][:, :, None].float()
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("inv_freq.bfloat16().float()).bfloat16()", "inv_freq)"),
]
