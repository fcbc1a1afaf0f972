"""The keys are normed with another eps, which shows if they are small."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def norm_rope(q, k, q_weight, k_weight, eps, cos, sin):
    """q and k: `[tokens, heads, dim]`; cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    return turn(rms(q, q_weight, eps), cos, sin).type_as(q), turn(rms(k, k_weight, 1e-12), cos, sin).type_as(k)


TARGET = "norm_rope"
GIVEN = {"layout": "thd"}
REPAIR = [
    ("1e-12", "eps"),
]
