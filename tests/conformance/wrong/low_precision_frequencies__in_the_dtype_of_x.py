"""inv_freq is cast to the dtype of x, and so are cos and sin, so float32 tensors do not show it."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None, None].float() * self.inv_freq.to(x.dtype).float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


TARGET = "Rotary"
GIVEN = {"layout": "bshd"}
REPAIR = [(".to(x.dtype).float()", "")]
