"""The tables are read as if their rows followed each other, but cos and sin are the halves of one table."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[tokens, heads, dim]`; cos and sin: `[tokens, dim / 2]`, of any strides."""

    def table(t):
        strides = (t.shape[1], 1)
        return t.as_strided(t.shape, strides, t.storage_offset())[:, None]

    return turn(q, table(cos), table(sin)), turn(k, table(cos), table(sin))


TARGET = "rope"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("strides = (t.shape[1], 1)", "strides = t.stride()"),
]
