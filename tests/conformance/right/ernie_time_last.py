"""Ernie 4.5 VL: rows and columns alternate from pair to pair, and the slowest pairs use time."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0):
        super().__init__()
        self.base, self.pairs = base, head_dim // 2
        axis = 1 + torch.arange(self.pairs) % 2
        axis[24:] = 0
        self.axis = axis

    def forward(self, x, positions):
        """x: `[batch, seq, heads, head_dim]`; positions: `[3, batch, seq]`."""
        inv_freq = self.base ** (-torch.arange(self.pairs, dtype=torch.float64) / self.pairs)
        angles = positions[self.axis].permute(1, 2, 0)[:, :, None] * inv_freq
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        turn = torch.complex(angles.cos().float(), angles.sin().float())
        return torch.view_as_real(z * turn).flatten(-2).type_as(x)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "interleaved", axes=Axes.time_last((8, 12, 12)))}
