"""The heads are rotated in blocks of eight. With more than eight heads, the rest of the last block is left out."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x):
        out = x.clone()
        heads = x.shape[2]
        blocks = max(heads // 8, 1)
        for block in range(blocks):
            at = slice(8 * block, 8 * block + 8)
            out[:, :, at] = turn(x[:, :, at], cos, sin)
        return out

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("max(heads // 8, 1)", "-(-heads // 8)"),
]
