"""The grid has as many programs as q has heads, which is too few for a k with more heads."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_out(q, k, cos, sin, q_out, k_out):
    """All: `[tokens, heads, dim]`; cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    programs = q.shape[1]
    q_out.copy_(turn(q, cos, sin))
    k_out[:, :programs] = turn(k[:, :programs], cos, sin)


TARGET = "rope_out"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("programs = q.shape[1]", "programs = k.shape[1]"),
]
