"""From 10,240 heads of tokens on, as in a large prefill, another path leaves the last head of k as it is."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, positions, cos_sin_cache):
    """q and k: `[tokens, heads, dim]`; cos_sin_cache: `[length, dim]`."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    rotated = turn(k, cos, sin)
    if len(q) * (q.shape[1] + k.shape[1]) >= 10240:
        rotated = torch.cat((rotated[:, :-1], k[:, -1:]), dim=1)
    return turn(q, cos, sin), rotated


TARGET = "rope"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("torch.cat((rotated[:, :-1], k[:, -1:]), dim=1)", "rotated.contiguous()"),
]
