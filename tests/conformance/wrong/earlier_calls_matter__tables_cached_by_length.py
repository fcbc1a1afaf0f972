"""The tables of all rows are cached until the number of tokens changes, even if the positions change."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base, self.tokens = dim, base, 0

    def forward(self, x, positions):
        if self.tokens != x.shape[1]:
            self.tokens = x.shape[1]
            inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
            angles = positions.expand(x.shape[0], -1)[:, :, None, None].float() * inv_freq
            self.cos, self.sin = angles.cos(), angles.sin()
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * self.cos - x2 * self.sin, x2 * self.cos + x1 * self.sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("if self.tokens != x.shape[1]:", "if True:"),
]
