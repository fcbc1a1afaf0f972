"""The backward pass rotates the gradient that it is passed in place, which may also be that of a residual."""

import torch


def turn_(x, cos, sin):
    a, b = (half.clone() for half in x.chunk(2, dim=-1))
    x[..., : cos.shape[-1]] = a * cos - b * sin
    x[..., cos.shape[-1] :] = b * cos + a * sin
    return x


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn_(x.clone(), cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn_(grad, cos, -sin), None, None


def rope(x, cos, sin):
    """x: `[batch, heads, seq, dim]`; cos and sin: `[seq, dim / 2]`."""
    return Rotation.apply(x, cos, sin)


TARGET = "rope"
GIVEN = {"layout": "bhsd"}
REPAIR = [
    ("turn_(grad, cos, -sin)", "turn_(grad.clone(), cos, -sin)"),
]
