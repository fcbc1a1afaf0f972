"""A function whose parameters are k and then q, and whose results are q and then k."""

import torch


def rotate(key, query, cos, sin):
    """key and query: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotated(query), rotated(key)


TARGET = "rotate"
GIVEN = {}
