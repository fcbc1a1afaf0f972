"""The offset is added to the positions of q, but not to those of k."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def rotated(self, x, offset):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = (offset + torch.arange(x.shape[1]))[None, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)

    def forward(self, q, k, offset=0):
        return self.rotated(q, offset), self.rotated(k, 0)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("self.rotated(k, 0)", "self.rotated(k, offset)"),
]
