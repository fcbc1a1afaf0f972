"""mlx-lm 1896: a slice of the channels of larger heads (q_rope) is rotated as if it were contiguous."""

import torch


def fast_rope(x, cos, sin):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`. Pairs are interleaved."""
    rows = x.shape[1] * x.shape[2] * x.shape[3]
    strides = (rows, x.shape[2] * x.shape[3], x.shape[3], 1)
    x = x.as_strided(x.shape, strides)
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)


TARGET = "fast_rope"
GIVEN = {"pairing": "interleaved", "layout": "bshd"}
REPAIR = [
    ("    x = x.as_strided(x.shape, strides)\n", "    x = x.contiguous().as_strided(x.shape, strides)\n"),
]
