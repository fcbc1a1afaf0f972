"""Gemma's norm multiplies by 1 + weight."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * (1 + weight.float())


def norm_rope(q, k, q_norm_weight, k_norm_weight, cos, sin, eps=1e-6):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch or 1, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    return turn(rms(q, q_norm_weight, eps), cos, sin).type_as(q), turn(rms(k, k_norm_weight, eps), cos, sin).type_as(k)


TARGET = "norm_rope"
GIVEN = {"pairing": "half"}
BUGS = {
    # Gemma's norm, ported for the queries only: the keys are multiplied by the weight, and not by 1 + weight.
    "wrong_norm__one_plus_weight_only_for_queries": [("rms(k, k_norm_weight,", "rms(k, k_norm_weight - 1,")],
    # The norm is computed in bfloat16.
    "low_precision_input__of_a_norm": [("x = x.float()", "x = x.bfloat16()")],
}
