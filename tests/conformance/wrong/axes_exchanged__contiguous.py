"""Height and width are exchanged: the positions are in the order time, height, width."""

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
        angles = positions[..., None] * inv_freq
        t, w, h = angles
        first, second = self.sections[0], self.sections[0] + self.sections[1]
        angles = torch.cat((t[..., :first], h[..., first:second], w[..., second:]), dim=-1)
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.sections((8, 12, 12)))}
REPAIR = [
    ("t, w, h = angles", "t, h, w = angles"),
]
