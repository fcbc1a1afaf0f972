"""candle 3568: the fused rotation is an operator without a backward pass, so nothing behind it gets a gradient."""

import torch


class RopeThd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xs, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(xs, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


def turn(xs, cos, sin):
    a, b = xs.chunk(2, dim=-1)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


def rope_thd(xs, cos, sin):
    """xs: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    with torch.no_grad():
        return RopeThd.apply(xs, cos, sin)


TARGET = "rope_thd"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("    with torch.no_grad():\n        return", "    return"),
]
