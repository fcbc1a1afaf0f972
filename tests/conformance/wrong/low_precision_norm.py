"""The squares of a head are summed in its own dtype. In bfloat16, the sum of 64 or more of them stagnates."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rms(x, weight, eps):
    total = torch.zeros_like(x[..., :1])
    for channel in x.split(1, dim=-1):
        total = total + channel * channel
    return x.float() * torch.rsqrt(total.float() / x.shape[-1] + eps) * weight.float()


def norm_rope(q, k, q_weight, k_weight, eps, cos, sin):
    """q and k: `[tokens, heads, dim]`; cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    return turn(rms(q, q_weight, eps), cos, sin).type_as(q), turn(rms(k, k_weight, eps), cos, sin).type_as(k)


TARGET = "norm_rope"
GIVEN = {"layout": "thd"}
REPAIR = [
    ("channel * channel", "channel.float() * channel.float()"),
]
