"""The backward pass returns zeros for the channels that are passed on."""

import torch

from ropewalk import Rope


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        width = 2 * cos.shape[-1]
        return torch.cat((turn(x[..., :width], cos, sin), x[..., width:]), dim=-1)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        out = torch.zeros_like(grad)
        width = 2 * cos.shape[-1]
        out[..., :width] = turn(grad[..., :width], cos, -sin)
        return out, None, None


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, rotary_dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


TARGET = "rope"
GIVEN = {"rope": Rope(64, 10000.0, "half", rotary_dim=32)}
REPAIR = [
    ("torch.zeros_like(grad)", "grad.clone()"),
]
