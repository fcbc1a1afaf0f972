"""The channels come before the tokens, as in convolutions, and the rotation is by minus the angle."""

import torch


class Rope1d(torch.nn.Module):
    def __init__(self, dim, layer_idx, base=10000.0):
        super().__init__()
        self.layer_idx = layer_idx
        self.inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)

    def forward(self, x):
        """x: `[batch, channels, tokens]`."""
        angles = self.inv_freq[:, None] * torch.arange(x.shape[-1])
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=1).type_as(x)


TARGET = "Rope1d"
GIVEN = {"base": 10_000.0}
REPAIR = [("a * cos + b * sin, b * cos - a * sin", "a * cos - b * sin, b * cos + a * sin")]
