"""The backward pass of a fused kernel rotates in the direction of the forward pass."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return x * cos + rotate_half(x) * sin

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return grad * cos + rotate_half(grad) * sin, None, None


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    ("grad * cos + rotate_half(grad) * sin", "grad * cos - rotate_half(grad) * sin"),
]
