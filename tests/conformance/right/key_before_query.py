"""A module whose parameters and results are k and then q."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, k, q, positions):
        """k and q: `[batch, seq, heads, head_dim]`; positions: `[batch, seq]`."""
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = positions[..., None, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(k), rotated(q)


TARGET = "Rotary"
GIVEN = {"pairing": "half", "base": 10000.0}
