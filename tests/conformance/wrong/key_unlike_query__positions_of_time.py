"""The queries use all three axes, and the keys only time, so images are placed differently in q and k."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0, mrope_section=(8, 12, 12)):
        super().__init__()
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(mrope_section))
        self.pairs, self.base = head_dim // 2, base

    def rotated(self, x, positions):
        inv_freq = self.base ** (-torch.arange(self.pairs, dtype=torch.float64) / self.pairs)
        angles = positions[self.axis].movedim(0, -1)[:, :, None] * inv_freq
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[3, batch, seq]`."""
        of_keys = positions[:1].expand(3, -1, -1)
        return self.rotated(q, positions), self.rotated(k, of_keys)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.sections((8, 12, 12)))}
REPAIR = [
    ("positions[:1].expand(3, -1, -1)", "positions"),
]
