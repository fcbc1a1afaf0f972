"""Gemma 4 divides the exponents of its few frequencies by the whole head. Here they are divided by the rotated part."""

import torch

from ropewalk import Proportional, Rope


def rotate(x, positions):
    inv_freq = torch.nn.functional.pad(1e6 ** (-torch.arange(0, 16, 2).float() / 16), (0, 24))
    angles = positions[:, :, None, None].float() * inv_freq
    x1, x2 = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "rotate"
GIVEN = {"rope": Rope(64, 1e6, "half", scaling=Proportional(0.25))}
REPAIR = [("float() / 16)", "float() / 64)")]
