"""Each section starts with the highest frequency again, as in a grid, but one progression runs over all."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0, mrope_section=(8, 12, 12)):
        super().__init__()
        self.head_dim, self.base, self.sections = head_dim, base, mrope_section

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        inv_freq = self.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        exponents = torch.cat([torch.arange(s) for s in self.sections])
        axis = torch.arange(3).repeat_interleave(torch.tensor(self.sections))
        angles = positions[axis].movedim(0, -1) * inv_freq[exponents]
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.sections((8, 12, 12)))}
REPAIR = [
    ("inv_freq[exponents]", "inv_freq"),
    ("        exponents = torch.cat([torch.arange(s) for s in self.sections])\n", ""),
]
