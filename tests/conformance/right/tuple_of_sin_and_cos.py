"""The form of RoFormer, with a function that computes a tuple of sin and cos for the function that takes it."""

import torch


def sinusoids(positions):
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2).float() / 64)
    angles = positions[..., None].float() * inv_freq
    return angles.sin()[:, None], angles.cos()[:, None]


def apply_rotary(x, sinusoidal_pos=None):
    sin, cos = (table.type_as(x) for table in sinusoidal_pos)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


TARGET = "sinusoids,apply_rotary"
GIVEN = {"pairing": "interleaved", "base": 10000.0}
