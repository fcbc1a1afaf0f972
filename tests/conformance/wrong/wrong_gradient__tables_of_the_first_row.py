"""The backward pass turns all rows by the tables of the first. Rows at the same positions do not show it."""

import torch


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos[:1], -sin[:1]), None, None


def rope(q, k, cos, sin):
    """q and k: `[batch, heads, seq, dim]`; cos and sin: `[batch or 1, seq, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    return tuple(Rotation.apply(x.float(), cos, sin).type_as(x) for x in (q, k))


TARGET = "rope"
GIVEN = {"layout": "bhsd"}
REPAIR = [
    ("cos[:1], -sin[:1]", "cos, -sin"),
]
