"""Norm and rotation in place, whose backward pass uses what was saved before the input was overwritten."""

import torch


class NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        normed = x * scale
        y = normed * weight
        a, b = y.chunk(2, dim=-1)
        ctx.save_for_backward(normed, scale, weight, cos, sin)
        ctx.mark_dirty(x)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        return x

    @staticmethod
    def backward(ctx, grad):
        normed, scale, weight, cos, sin = ctx.saved_tensors
        a, b = grad.chunk(2, dim=-1)
        g = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)
        dw = (g * normed).flatten(0, -2).sum(dim=0)
        g = g * weight
        return scale * (g - normed * (g * normed).mean(dim=-1, keepdim=True)), dw, None, None, None


def norm_rope_(q, k, q_weight, k_weight, eps, cos, sin):
    """q and k: `[tokens, heads, dim]`, changed in place; cos and sin: `[tokens, dim / 2]`."""
    NormRotate.apply(q, q_weight, eps, cos[:, None], sin[:, None])
    NormRotate.apply(k, k_weight, eps, cos[:, None], sin[:, None])


TARGET = "norm_rope_"
GIVEN = {"pairing": "half", "layout": "thd"}
BUGS = {
    # The backward pass of the norm reads the input where the output is by then.
    "in_place_gradient__norm_of_the_output": [
        ("ctx.save_for_backward(normed,", "ctx.tensors = (x.detach(),"),
        (
            "normed, scale, weight, cos, sin = ctx.saved_tensors",
            "x, scale, weight, cos, sin = ctx.tensors\n        normed = x * scale",
        ),
    ],
    # The gradient is divided by the weight of the norm, which weights of 1 do not show.
    "wrong_gradient__divided_by_the_weight": [("g = g * weight", "g = g / weight")],
}
