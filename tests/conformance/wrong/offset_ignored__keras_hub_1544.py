"""The code never reads its parameter for the offset, so every new token is rotated as the first one."""

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, head_dim, max_wavelength=10000.0):
        super().__init__()
        self.head_dim, self.max_wavelength = head_dim, max_wavelength

    def forward(self, x, start_index=0):
        positions = torch.arange(x.shape[1])
        inv_freq = self.max_wavelength ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = positions[None, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "RotaryEmbedding"
GIVEN = {}
REPAIR = [("torch.arange(x.shape[1])", "start_index + torch.arange(x.shape[1])")]
