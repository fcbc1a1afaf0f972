"""The angles are computed by a matrix product in TF32."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        def tf32(t):
            mantissa, exponent = torch.frexp(t)
            return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)

        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = tf32(positions.float())[:, :, None, None] * tf32(inv_freq)
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [
    ("tf32(positions.float())", "positions.float()"),
    ("* tf32(inv_freq)", "* inv_freq"),
]
