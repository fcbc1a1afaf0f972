"""Half of the pairs rest, as in the speed runs of nanoGPT, and the others turn by minus their angle."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        speeds = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4)
        self.register_buffer("speeds", torch.cat((speeds, torch.zeros(dim // 4))))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).float()[:, None, None] * self.speeds
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [("(a * cos + b * sin, b * cos - a * sin)", "(a * cos - b * sin, b * cos + a * sin)")]
