"""A table for heads of 64 channels, of which smaller heads would get the first pairs."""

import torch

INV_FREQ = 10000.0 ** (-torch.arange(0, 64, 2).float() / 64)


def rotate(x, positions):
    angles = positions[..., None, None] * INV_FREQ[: x.shape[-1] // 2]
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)


TARGET = "rotate"
GIVEN = {"base": 10000.0}
