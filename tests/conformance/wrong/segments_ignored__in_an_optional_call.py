"""Positions count through all documents of a row if cu_seqlens, which are optional, are passed."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, q, k, cu_seqlens=None):
        """q and k: `[batch, seq, heads, dim]`. With cu_seqlens, the batch is 1."""
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        positions = torch.arange(q.shape[1])
        if cu_seqlens is not None:
            document = torch.searchsorted(cu_seqlens.long(), positions, right=True) - 1
            positions = positions - cu_seqlens[document] * 0
        angles = positions[:, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return turn(q), turn(k)


TARGET = "Rotary"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("[document] * 0", "[document]"),
]
