"""The frequency of the first pair is 1 and two roundings, and not 1, so that it is off by 1.5e-5 at position 63."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        inv_freq[0] += 2.4e-7
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {"base": 10000.0}
REPAIR = [
    ("2.4e-7", "0.0"),
]
