"""A Function that rotates in place, says so to autograd, and turns gradients back in memory of its own."""

import torch


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        half = x.shape[-1] // 2
        a, b = x[..., :half].clone(), x[..., half:].clone()
        x[..., :half] = a * cos - b * sin
        x[..., half:] = b * cos + a * sin
        return x

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        a, b = grad.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1), None, None


def rotate_(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`, changed in place; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    Rotate.apply(q, cos, sin)
    Rotate.apply(k, cos, sin)


TARGET = "rotate_"
GIVEN = {"pairing": "half"}
