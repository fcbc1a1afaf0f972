"""The path for a single token (decoding) takes the tables of the first row for the whole batch."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    if q.shape[1] == 1:
        cos, sin = cos[:1], sin[:1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    return turn(q, cos, sin), turn(k, cos, sin)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("    if q.shape[1] == 1:\n        cos, sin = cos[:1], sin[:1]\n", ""),
]
