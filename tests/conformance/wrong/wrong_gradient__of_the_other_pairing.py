"""The backward pass always turns the pairs of one pairing, and the function has an option for the other."""

import torch


def turn(x, cos, sin, interleaved):
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return turn(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin, False), None, None, None


def apply_rotary_emb(x, cos, sin, interleaved=False):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[seq, dim / 2]`."""
    return Rotation.apply(x.float(), cos[:, None], sin[:, None], interleaved).type_as(x)


TARGET = "apply_rotary_emb"
GIVEN = {"layout": "bshd", "pairing": "interleaved"}
REPAIR = [
    ("-sin, False)", "-sin, ctx.interleaved)"),
]
