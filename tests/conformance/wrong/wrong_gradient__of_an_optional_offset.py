"""The backward pass forgets the offsets of the rows. Without them, the gradient is right."""

import torch


def turn(x, cos, sin, seqlen_offsets, back=1):
    offsets = torch.as_tensor(seqlen_offsets)
    positions = torch.arange(x.shape[1]) + offsets.reshape(-1, 1)
    cos, sin = cos[positions][:, :, None], back * sin[positions][:, :, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, seqlen_offsets):
        ctx.save_for_backward(cos, sin, torch.as_tensor(seqlen_offsets))
        return turn(x, cos, sin, seqlen_offsets)

    @staticmethod
    def backward(ctx, grad):
        cos, sin, *_rest = ctx.saved_tensors
        return turn(grad, cos, sin, 0, back=-1), None, None, None


def apply_rotary_emb(x, cos, sin, seqlen_offsets=0):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[length, dim / 2]`; seqlen_offsets: int or `[batch]`."""
    return Rotation.apply(x.float(), cos, sin, seqlen_offsets).type_as(x)


TARGET = "apply_rotary_emb"
GIVEN = {"layout": "bshd"}
REPAIR = [
    ("sin, 0, back", "sin, *_rest, back"),
]
