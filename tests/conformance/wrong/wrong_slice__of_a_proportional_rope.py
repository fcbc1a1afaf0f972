"""Gemma 4 rotates channels i and i + 32 of a head of 64 with 8 frequencies. Here they are the first 16 channels."""

import torch

from ropewalk import Proportional, Rope


def rotate(x, positions):
    d = 16
    inv_freq = 1e6 ** (-torch.arange(0, 16, 2).float() / 64)
    angles = positions[:, :, None, None].float() * torch.nn.functional.pad(inv_freq, (0, (d - 16) // 2))
    x1, x2 = x[..., :d].float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., d:].float()), dim=-1).type_as(x)


TARGET = "rotate"
GIVEN = {"rope": Rope(64, 1e6, "half", scaling=Proportional(0.25))}
REPAIR = [("d = 16", "d = 64")]
