"""The norm runs over all heads of a token, as in OLMo 2 and Wan, so a weight has heads · dim elements."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6):
    """q and k: `[tokens, heads, dim]`; weights: `[heads · dim]`; cos and sin: `[tokens, dim / 2]`."""
    out = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        flat = torch.nn.functional.rms_norm(x.float().flatten(1), (weight.numel(),), weight.float(), eps)
        out.append(turn(flat.view(x.shape), cos[:, None], sin[:, None]).type_as(x))
    return tuple(out)


TARGET = "norm_rope"
GIVEN = {"pairing": "half"}
