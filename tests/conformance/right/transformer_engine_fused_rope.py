"""Transformer Engine's form: angles instead of tables, `sbhd` or `bshd`, and a Function with its own backward pass."""

import torch


class FusedRoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, freqs, tensor_format, interleaved):
        ctx.save_for_backward(freqs)
        ctx.form = tensor_format, interleaved
        return turn(t, freqs, tensor_format, interleaved, 1.0)

    @staticmethod
    def backward(ctx, grad):
        (freqs,) = ctx.saved_tensors
        return turn(grad, freqs, *ctx.form, -1.0), None, None, None


def turn(t, freqs, tensor_format, interleaved, sign):
    width = freqs.shape[-1]
    angles = freqs[: t.shape[0] if tensor_format == "sbhd" else t.shape[1]]
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    cos, sin = angles.cos(), sign * angles.sin()
    x = t[..., :width].float()
    if interleaved:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        a, b = x.chunk(2, dim=-1)
        other = torch.cat((-b, a), dim=-1)
    return torch.cat(((x * cos + other * sin).type_as(t), t[..., width:]), dim=-1)


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=False, fused=True):
    """t: `[seq, batch, heads, dim]`; freqs: the angles `[length, 1, 1, rotary_dim]`."""
    return FusedRoPE.apply(t, freqs, tensor_format, interleaved)


TARGET = "apply_rotary_pos_emb"
GIVEN = {"pairing": "half", "layout": "sbhd"}
