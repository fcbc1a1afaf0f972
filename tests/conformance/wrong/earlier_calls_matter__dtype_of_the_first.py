"""The tables are cached in the dtype of the first caller."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base, self.tables = dim, base, None

    def forward(self, x, positions):
        if self.tables is None:
            inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
            angles = torch.arange(4096)[:, None].float() * inv_freq
            self.tables = angles.cos().type_as(x), angles.sin().type_as(x)
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = (table[positions][:, :, None].float() for table in self.tables)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("angles.cos().type_as(x), angles.sin().type_as(x)", "angles.cos(), angles.sin()"),
]
