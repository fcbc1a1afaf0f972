"""A Function that rotates in place, says so to autograd, and rotates gradients forwards."""

import torch


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = cos[None, :, None], sin[None, :, None]
        ctx.save_for_backward(cos, sin)
        a, b = x.clone().chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        a, b = grad.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), None, None


TARGET = "Rotate"
GIVEN = {"layout": "bshd"}
REPAIR = [
    (
        "        a, b = grad.chunk(2, dim=-1)\n        return torch.cat((a * cos - b * sin, b * cos + a * sin)",
        "        a, b = grad.chunk(2, dim=-1)\n        return torch.cat((a * cos + b * sin, b * cos - a * sin)",
    )
]
