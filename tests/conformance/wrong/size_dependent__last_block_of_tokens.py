"""Tokens are rotated in blocks of 64, and what remains after the last full block is left as it is."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    seq = q.shape[1]
    end = seq if seq < 64 else seq // 64 * 64

    def rotated(x):
        return torch.cat((turn(x[:, :end], cos[:, :end], sin[:, :end]), x[:, end:]), dim=1)

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("seq if seq < 64 else seq // 64 * 64", "seq"),
]
