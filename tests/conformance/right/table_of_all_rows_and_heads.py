"""Tables `[1, 1, seq, dim]` of a length, with axes for rows and heads, which the other function cuts."""

import torch


def rope_cache(seq_len, dim, theta=10000.0):
    inv_freq = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(seq_len), inv_freq).repeat(1, 2)[None, None]
    return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(q, k, cos, sin):
    """q and k: `[batch, heads, seq, dim]`."""
    cos, sin = cos[:, :, : q.shape[2]], sin[:, :, : q.shape[2]]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "rope_cache,apply_rope"
GIVEN = {"pairing": "half", "base": 10000.0, "ignore": ["wider-output"]}
