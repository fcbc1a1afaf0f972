"""The table has the length of the first call, and a longer call fails."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
        self.cached = None

    def forward(self, x, seq_len):
        if self.cached is None:
            angles = torch.arange(seq_len).float()[:, None] * self.inv_freq
            self.cached = angles.cos(), angles.sin()
        return tuple(table[:seq_len] for table in self.cached)


def apply_rotary(q, k, cos, sin):
    """q and k: `[batch, seq, heads, channels]`."""

    def turn(x):
        a, b = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "Rotary,apply_rotary"
GIVEN = {"layout": "bshd"}
REPAIR = [("if self.cached is None:", "if self.cached is None or len(self.cached[0]) < seq_len:")]
