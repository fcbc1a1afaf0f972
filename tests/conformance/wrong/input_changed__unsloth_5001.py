"""Unsloth 5001: q and k are rotated in place if they are contiguous, and copied only if they are not."""

import torch


class FastRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        out = x.clone() if not x.is_contiguous() else x.detach()
        half = out.shape[-1] // 2
        a, b = out[..., :half].clone(), out[..., half:].clone()
        out[..., :half] = a * cos - b * sin
        out[..., half:] = b * cos + a * sin
        return out

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        a, b = grad.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1), None, None


def fast_rope_embedding(Q, K, cos, sin):  # noqa: N803
    """Q and K: `[batch, heads, seq, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return FastRope.apply(Q, cos, sin), FastRope.apply(K, cos, sin)


TARGET = "fast_rope_embedding"
GIVEN = {"pairing": "half", "layout": "bhsd"}
REPAIR = [
    ("x.clone() if not x.is_contiguous() else x.detach()", "x.clone()"),
]
