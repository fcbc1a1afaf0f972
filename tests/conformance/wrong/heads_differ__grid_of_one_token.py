"""A grid over rows and heads is divided by the number of rows, but only for one token, as in a kernel for decoding."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        rows, tokens, heads, _ = x.shape
        at = positions[:, :, None].expand(rows, tokens, heads)
        if tokens == 1:
            program = torch.arange(rows * heads)
            at = positions[program % rows].view(rows, 1, heads)
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = at[..., None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("program % rows", "program // heads"),
]
