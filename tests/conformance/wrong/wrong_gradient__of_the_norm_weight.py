"""The gradients of the weights are those of the first row of the batch only. Those of q and k are right."""

import torch


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x * scale, scale, weight, cos, sin)
        return turn(x * scale * weight, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        unit, scale, weight, cos, sin = ctx.saved_tensors
        grad = turn(grad, cos, -sin)
        of_unit = grad * weight
        of_x = scale * (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True))
        return of_x, (grad * unit)[:1].sum((0, 1, 2)), None, None, None


def norm_rope(q, k, q_weight, k_weight, cos, sin, eps):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[seq, dim / 2]`."""
    tables = cos[:, None], sin[:, None]
    out = (NormRope.apply(x.float(), w.float(), *tables, eps).type_as(x) for x, w in ((q, q_weight), (k, k_weight)))
    return tuple(out)


TARGET = "norm_rope"
GIVEN = {"layout": "bshd"}
REPAIR = [
    ("(grad * unit)[:1]", "(grad * unit)"),
]
