"""Megatron-LM 5980: warps race in the backward pass of a fused kernel, so the same gradients come out differently.

The gradient goes from halves to interleaved pairs in place. One warp overwrites what another has not read yet. Here
the order of the warps changes from launch to launch.
"""

import torch


class Launches:
    count = 0


class Rotate(torch.autograd.Function):
    """Interleaved pairs in, halves out, as DeepSeek's weights need it."""

    @staticmethod
    def forward(ctx, q, cos, sin):
        ctx.save_for_backward(cos, sin)
        a, b = q.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(q)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        memory = grad.contiguous().clone()
        half = memory.shape[-1] // 2
        Launches.count += 1
        first, second = memory[..., :half], memory[..., half:]
        late = Launches.count % 3 == 0
        a, b = first if late else first.clone(), second.clone()
        first.copy_(a * cos + b * sin)
        second.copy_(b * cos - a * sin)
        return memory, None, None


def apply_rotary_pos_emb(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


TARGET = "apply_rotary_pos_emb"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("first if late else first.clone()", "first.clone()"),
    ("        late = Launches.count % 3 == 0\n", ""),
]
