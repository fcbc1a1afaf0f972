"""A Function that rotates in place, says so to autograd, and returns what it was passed."""

import torch


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = (table[:, None, : x.shape[-1] // 2] for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        a, b = x.clone().chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        a, b = grad.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1), None, None


def fast_rope_embedding(Q, K, cos, sin):  # noqa: N803
    """Q and K: `[batch, heads, seq, dim]`; cos and sin: `[seq, dim]`."""
    return tuple(Rotate.apply(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (Q, K))


TARGET = "fast_rope_embedding"
GIVEN = {}
