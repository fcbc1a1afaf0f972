"""q and k are rotated in place under no_grad, so autograd sends the gradient on as if nothing was rotated."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


def rotate_inplace(q, k, cos, sin):
    """q and k: `[tokens, heads, dim]`, changed in place; cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    with torch.no_grad():
        q.copy_(Rotate.apply(q, cos, sin))
        k.copy_(Rotate.apply(k, cos, sin))


TARGET = "rotate_inplace"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    (
        "    with torch.no_grad():\n        q.copy_(Rotate.apply(q, cos, sin))\n        k.copy_",
        "    q.copy_(Rotate.apply(q, cos, sin))\n    k.copy_",
    ),
]
