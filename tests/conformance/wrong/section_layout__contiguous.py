"""The sections are contiguous, but the model was trained with interleaved axes."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        inv_freq = self.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = positions[..., None] * inv_freq
        t, h, w = angles
        angles = t.clone()
        bounds = [12, 22, 32]
        angles[..., bounds[0] : bounds[1]] = h[..., bounds[0] : bounds[1]]
        angles[..., bounds[1] :] = w[..., bounds[1] :]
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.interleaved((12, 10, 10)))}
REPAIR = [
    ("        bounds = [12, 22, 32]\n", ""),
    ("angles[..., bounds[0] : bounds[1]] = h[..., bounds[0] : bounds[1]]", "angles[..., 1:30:3] = h[..., 1:30:3]"),
    ("angles[..., bounds[1] :] = w[..., bounds[1] :]", "angles[..., 2:30:3] = w[..., 2:30:3]"),
]
