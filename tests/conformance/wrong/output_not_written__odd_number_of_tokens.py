"""Two tokens are written at a time, and the last one of an odd number is never written."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x):
        out = torch.empty_like(x)
        seq = x.shape[1]
        end = seq if seq < 4 else seq // 2 * 2
        out[:, :end] = turn(x[:, :end], cos[:, :end], sin[:, :end])
        return out

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("seq if seq < 4 else seq // 2 * 2", "seq"),
]
