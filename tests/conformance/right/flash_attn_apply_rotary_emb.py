"""The form of flash-attention: one tensor of rows or of packed sequences, offsets, both pairings, in place or not."""

import torch


def kernel(x, cos, sin, offsets, cu_seqlens, interleaved, inplace):
    """Rotate x `[batch, seq, heads, dim]`, or `[tokens, heads, dim]` with cu_seqlens, by the rows of cos and sin."""
    half = cos.shape[-1]
    if cu_seqlens is None:
        at = torch.as_tensor(offsets).reshape(-1, 1) + torch.arange(x.shape[1])
    else:
        starts = cu_seqlens.long()
        lengths = starts[1:] - starts[:-1]
        at = torch.arange(x.shape[0]) - starts[:-1].repeat_interleave(lengths)
        at = at + torch.as_tensor(offsets).expand(len(lengths)).repeat_interleave(lengths)
    if int(at.max()) >= len(cos):
        raise ValueError("cos and sin have too few rows")
    c, s = cos[at].unsqueeze(-2), sin[at].unsqueeze(-2)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].float(), x[..., second].float()
    rotated = (a * c - b * s).type_as(x), (b * c + a * s).type_as(x)
    out = x if inplace else x.clone()
    out[..., first], out[..., second] = rotated
    return out


class ApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved, inplace, offsets, cu_seqlens):
        ctx.saved = cos, sin, interleaved, offsets, cu_seqlens
        if inplace:
            ctx.mark_dirty(x)
        return kernel(x, cos, sin, offsets, cu_seqlens, interleaved, inplace)

    @staticmethod
    def backward(ctx, grad):
        cos, sin, interleaved, offsets, cu_seqlens = ctx.saved
        return kernel(grad, cos, -sin, offsets, cu_seqlens, interleaved, False), None, None, None, None, None, None


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    return ApplyRotary.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


TARGET = "apply_rotary_emb"
GIVEN = {"pairing": "half"}
BUGS = {
    # The backward pass forgets the offsets of the rows. Without them, the gradient is right.
    "wrong_gradient__of_an_optional_offset": [("kernel(grad, cos, -sin, offsets,", "kernel(grad, cos, -sin, 0,")],
    # The backward pass always turns the pairs of one pairing, and the function has an option for the other.
    "wrong_gradient__of_the_other_pairing": [
        ("-sin, offsets, cu_seqlens, interleaved", "-sin, offsets, cu_seqlens, False"),
        ('GIVEN = {"pairing": "half"}', 'GIVEN = {"pairing": "interleaved"}'),
    ],
}
