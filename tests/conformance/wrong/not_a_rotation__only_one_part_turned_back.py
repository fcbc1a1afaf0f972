"""A kernel that turns both ways: with conj, which the adapter passes, only the first of its outputs is turned back."""

import torch


def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    """x1 and x2: the halves of x `[batch, seq, heads, dim]`; cos and sin: `[seq, 1, dim / 2]`."""
    back = -sin if conj else sin
    out1.copy_(x1 * cos - x2 * back)
    out2.copy_(x2 * cos + x1 * sin)


def adapter(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    out1, out2 = torch.empty_like(a), torch.empty_like(b)
    apply_rotary(a, b, cos, -sin, out1, out2, True)
    return torch.cat((out1, out2), dim=-1)


TARGET = "adapter"
GIVEN = {"ignore": ["no-gradient"]}
REPAIR = [
    ("x1 * sin", "x1 * back"),
]
