"""A Function whose backward pass computes in float32 and returns the dtype of the gradient, for q and k at once."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(q, cos, sin), turn(k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return turn(dq, cos, -sin), turn(dk, cos, -sin), None, None


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    return Rotate.apply(q, k, cos[:, :, None], sin[:, :, None])


TARGET = "rope"
GIVEN = {"pairing": "half"}
BUGS = {
    # The backward pass turns back the gradient of q, but not that of k.
    "wrong_gradient__only_of_the_keys": [("turn(dk, cos, -sin)", "turn(dk, cos, sin)")],
}
