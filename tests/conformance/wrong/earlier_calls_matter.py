"""The base grows with the longest sequence so far and is never reset (dynamic NTK)."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base, self.longest = dim, base, 0

    def forward(self, x, positions):
        self.longest = max(self.longest, int(positions.max()) + 1)
        base = self.base * max(1.0, self.longest / 2048)
        inv_freq = base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("        self.longest = max(self.longest, int(positions.max()) + 1)\n", ""),
]
