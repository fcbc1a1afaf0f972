"""A video: 8 pairs for the frame, then 12 each for row and column, with a progression for each; interleaved pairs."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        counts = (pairs - 2 * (pairs * 3 // 8), pairs * 3 // 8, pairs * 3 // 8)
        angles = torch.cat(
            [
                positions[axis, ..., None] * self.base ** (-torch.arange(count, dtype=torch.float64) / count)
                for axis, count in enumerate(counts)
            ],
            dim=-1,
        )
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x[..., ::2].float(), x[..., 1::2].float()
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "interleaved", axes=Axes.axial((16, 24, 24)))}
