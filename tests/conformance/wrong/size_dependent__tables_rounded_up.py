"""The exponents are taken over a number of channels that is rounded up to a multiple of 32."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_size, rotary_dim, base=10000.0):
        super().__init__()
        self.rotary_dim = rotary_dim
        width = -(-rotary_dim // 32) * 32
        self.inv_freq = base ** (-torch.arange(0, rotary_dim, 2).float() / width)

    def forward(self, positions, query, key):
        angles = (positions[..., None].float() * self.inv_freq).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()

        def rotated(x):
            a, b = x[..., : self.rotary_dim].float().chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            return torch.cat((turned.type_as(x), x[..., self.rotary_dim :]), dim=-1)

        return rotated(query), rotated(key)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [("-(-rotary_dim // 32) * 32", "rotary_dim")]
