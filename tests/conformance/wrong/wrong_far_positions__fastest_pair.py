"""From position 30,000 on, the first pair is off by a little: by less than float32 explains for slower pairs."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        angles[..., 0] += 0.007 * (positions >= 30_000)[:, :, None]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("0.007", "0.0"),
]
