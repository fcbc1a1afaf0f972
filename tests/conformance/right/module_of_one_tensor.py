"""A module for one tensor with the layout bhsd, which counts positions from 0 and computes the angles in forward."""

import torch


class Rope(torch.nn.Module):
    def __init__(self, head_dim, theta=10000.0):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x):
        inv_freq = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), inv_freq)
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


TARGET = "Rope"
GIVEN = {"base": 500000.0, "layout": "bhsd", "pairing": "half"}
