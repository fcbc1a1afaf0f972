"""A kernel that works in place is tuned in its first call for each size, and each trial rotates the input again."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


TUNED = {}


def rotate_inplace(q, k, cos, sin):
    """q and k: `[tokens, heads, dim]`, changed in place; cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    for x in (q, k):
        trials = 1 if TUNED.get(x.shape) else 2
        TUNED[x.shape] = "block of 64"
        for _ in range(trials):
            x.copy_(turn(x, cos, sin))


TARGET = "rotate_inplace"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("1 if TUNED.get(x.shape) else 2", "1"),
]
