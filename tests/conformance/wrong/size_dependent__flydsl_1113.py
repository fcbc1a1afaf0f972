"""FlyDSL 1113: the lane with the other half of a pair is found by exclusive or, which needs a power of two.

Each lane holds 4 channels. A head of 96 channels has 24 lanes, 12 for each half, and lane 4 exchanges with lane 8
instead of 16.
"""

import torch


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""

    def rotated(x):
        vectors = x.float().unflatten(-1, (-1, 4))
        lanes = vectors.shape[-2]
        lane = torch.arange(lanes)
        partner = lane ^ (lanes // 2)
        other = vectors[..., partner.clamp(max=lanes - 1), :]
        c = torch.cat((cos, cos), dim=-1)[:, :, None].unflatten(-1, (-1, 4))
        s = torch.cat((-sin, sin), dim=-1)[:, :, None].unflatten(-1, (-1, 4))
        return (vectors * c + other * s).flatten(-2).type_as(x)

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("lane ^ (lanes // 2)", "(lane + lanes // 2) % lanes"),
]
