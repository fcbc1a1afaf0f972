"""Linear scaling and an attention factor that no config states. They may be intended, so they are not reported."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0, scaling_factor=8.0):
        super().__init__()
        self.dim, self.base, self.scaling_factor = dim, base, scaling_factor

    def forward(self, q, k, positions):
        freqs = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim) / self.scaling_factor
        angles = positions[:, :, None, None].float() * freqs
        cos, sin = 1.1 * angles.cos(), 1.1 * angles.sin()

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {}
