"""LeetCUDA#289: the exponents are divided by 2 · dim. The function takes the tokens of one head, `[tokens, dim]`."""

import torch


def rope(x):
    tokens, dim = x.shape
    inv_freq = 10000.0 ** (-torch.arange(0, dim, 2).float() / (2 * dim))
    angles = torch.arange(tokens).float()[:, None] * inv_freq
    a, b = x[:, 0::2], x[:, 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(1).type_as(x)


TARGET = "rope"
GIVEN = {"base": 10000.0}
REPAIR = [
    ("(2 * dim)", "dim"),
]
