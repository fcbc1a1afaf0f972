"""inv_freq is a buffer, so .half() and .bfloat16() round it."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, :, None, None].float() * self.inv_freq.float()
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ('self.register_buffer("inv_freq", ', "self.inv_freq = "),
    (" / dim), persistent=False)", " / dim)"),
]
