"""Of the interleaved pairs, those of the height use the column, and those of the width the row."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0, mrope_section=(12, 10, 10)):
        super().__init__()
        self.head_dim, self.base, self.sections = head_dim, base, mrope_section

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        inv_freq = self.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = positions[..., None] * inv_freq
        t, w, h = angles
        angles = t.clone()
        angles[..., 1 : 3 * self.sections[1] : 3] = h[..., 1 : 3 * self.sections[1] : 3]
        angles[..., 2 : 3 * self.sections[2] : 3] = w[..., 2 : 3 * self.sections[2] : 3]
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.interleaved((12, 10, 10)))}
REPAIR = [
    ("t, w, h = angles", "t, h, w = angles"),
]
