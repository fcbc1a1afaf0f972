"""Angles are cached by the length alone, so a call with another offset gets the angles of the first call."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base, self.kept = dim, base, {}

    def forward(self, x, offset=0):
        if x.shape[1] not in self.kept:
            inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
            self.kept[x.shape[1]] = (offset + torch.arange(x.shape[1]))[None, :, None, None].float() * inv_freq
        angles = self.kept[x.shape[1]]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("if x.shape[1] not in self.kept", "if (x.shape[1], offset) not in self.kept"),
    ("self.kept[x.shape[1]] =", "self.kept[x.shape[1], offset] ="),
    ("angles = self.kept[x.shape[1]]", "angles = self.kept[x.shape[1], offset]"),
]
