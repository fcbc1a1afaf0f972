"""Norm and rotation work in place, and the backward pass of the norm reads the input where the output is by then."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        y = turn(x * scale * weight, cos, sin)
        saved = x.detach()
        ctx.tensors = saved, scale, weight, cos, sin
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight, cos, sin = ctx.tensors
        g = turn(grad, cos, -sin)
        normed = x * scale
        dw = (g * normed).flatten(0, -2).sum(dim=0)
        g = g * weight
        return scale * (g - normed * (g * normed).mean(dim=-1, keepdim=True)), dw, None, None, None


def norm_rope_(q, k, q_weight, k_weight, eps, cos, sin):
    """q and k: `[tokens, heads, dim]`, changed in place; cos and sin: `[tokens, dim / 2]`."""
    NormRotate.apply(q, q_weight, eps, cos[:, None], sin[:, None])
    NormRotate.apply(k, k_weight, eps, cos[:, None], sin[:, None])


TARGET = "norm_rope_"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("saved = x.detach()", "saved = x.detach().clone()"),
]
