"""NTK scales the base with the exponent 1 instead of dim / (dim - 2)."""

import torch

from ropewalk import NTK, Rope


class Rotary(torch.nn.Module):
    def __init__(
        self,
    ):
        super().__init__()
        self.dim, self.base, self.scaling = 64, 500000.0, {"factor": 4.0}

    def forward(self, x, positions):
        base = self.base * self.scaling["factor"]
        inv_freq = base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 500000.0, "half", scaling=NTK(4.0))}
REPAIR = [
    ('self.scaling["factor"]\n', 'self.scaling["factor"] ** (self.dim / (self.dim - 2))\n'),
]
