"""The form of Liger: an autograd Function of q and k `[batch, heads, seq, dim]` that rotates memory of its own."""

import torch


class LigerRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        ctx.save_for_backward(cos, sin)
        return rotated(q, cos, sin, 1), rotated(k, cos, sin, 1)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return rotated(dq, cos, sin, -1), rotated(dk, cos, sin, -1), None, None, None, None


def rotated(x, cos, sin, direction):
    half = x.shape[-1] // 2
    rows = x.transpose(1, 2).contiguous().clone()
    c, s = cos[..., None, :half], direction * sin[..., None, :half]
    a, b = rows[..., :half].clone(), rows[..., half:].clone()
    rows[..., :half] = a * c - b * s
    rows[..., half:] = b * c + a * s
    return rows.transpose(1, 2)


TARGET = "LigerRopeFunction"
GIVEN = {"pairing": "half"}
