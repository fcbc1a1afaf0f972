"""A Function that rotates the first channels of each head, and turns their gradients back in memory of its own."""

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
        out = grad.clone()
        width = 2 * cos.shape[-1]
        out[..., :width] = turn(grad[..., :width], cos, -sin)
        return out, None, None


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, rotary_dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


TARGET = "rope"
GIVEN = {"rope": Rope(64, 10000.0, "half", rotary_dim=32)}
BUGS = {
    # The gradient that the backward pass gets is rotated in place, which may also be that of a residual.
    "gradient_overwritten": [("grad.clone()", "grad")],
    # The backward pass returns zeros for the channels that are passed on.
    "wrong_gradient__channels_not_rotated": [("grad.clone()", "torch.zeros_like(grad)")],
    # The backward pass turns all rows by the tables of the first. Rows at the same positions do not show it.
    "wrong_gradient__tables_of_the_first_row": [("cos, -sin)", "cos[:1], -sin[:1])")],
}
