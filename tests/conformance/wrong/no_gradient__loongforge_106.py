"""LoongForge 106: the kernel for Wan's rotation is launched directly, and autograd does not see what it writes."""

import torch


def kernel(out, x, cos, sin):
    """Write the rotated x to out. Pairs are interleaved."""
    out, x = out.detach(), x.detach()
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    out[..., ::2] = a * cos - b * sin
    out[..., 1::2] = b * cos + a * sin


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x)
        kernel(out, x, cos, sin)
        return out

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad)
        kernel(out, grad, cos, -sin)
        return out, None, None


def launched(x, cos, sin):
    out = torch.empty_like(x)
    kernel(out, x, cos, sin)
    return out


def wan_rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return launched(q, cos, sin), launched(k, cos, sin)


TARGET = "wan_rope"
GIVEN = {"pairing": "interleaved"}
REPAIR = [
    (
        "return launched(q, cos, sin), launched(k, cos, sin)",
        "return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)",
    ),
]
