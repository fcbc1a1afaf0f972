"""A cache of frequencies for the whole process has no base in its keys, so a second model gets those of the first."""

import torch

CACHE = {}


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        if self.dim not in CACHE:
            CACHE[self.dim] = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * CACHE[self.dim]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("if self.dim not in CACHE", "if (self.dim, self.base) not in CACHE"),
    ("CACHE[self.dim] =", "CACHE[self.dim, self.base] ="),
    ("* CACHE[self.dim]\n", "* CACHE[self.dim, self.base]\n"),
]
