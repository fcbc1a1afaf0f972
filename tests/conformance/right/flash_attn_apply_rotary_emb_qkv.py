"""flash-attention's form of a fused qkv: in place, with fewer key heads than query heads, seen by autograd."""

import torch


class RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, rotated, interleaved):
        ctx.saved = cos, sin, rotated, interleaved
        ctx.mark_dirty(qkv)
        return write(qkv, cos, sin, rotated, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin, rotated, interleaved = ctx.saved
        return write(grad.clone(), cos, -sin, rotated, interleaved), None, None, None, None


def write(qkv, cos, sin, rotated, interleaved):
    half = cos.shape[-1]
    heads = qkv[:, :, :rotated]
    if interleaved:
        first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
    else:
        first, second = heads[..., :half], heads[..., half : 2 * half]
    a, b = first.float(), second.float()
    out = (a * cos - b * sin).type_as(qkv), (b * cos + a * sin).type_as(qkv)
    first.copy_(out[0])
    second.copy_(out[1])
    return qkv


def apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q, interleaved=False):
    """qkv: `[batch, seq, heads of q + 2 · heads of k, dim]`; cos and sin: `[seq, rotary_dim / 2]`."""
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    cos, sin = cos[:, None], sin[:, None]
    return RotateQKV.apply(qkv, cos, sin, num_heads_q + num_heads_k, interleaved)


TARGET = "apply_rotary_emb_qkv_"
GIVEN = {"pairing": "half"}
