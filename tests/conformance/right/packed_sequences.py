"""Packed sequences with tables for the longest one."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_packed(x, cu_seqlens, cos, sin):
    """x: `[tokens, heads, dim]`, all sequences behind each other; cos and sin: `[longest sequence, dim / 2]`."""
    starts = cu_seqlens.long()
    token = torch.arange(len(x))
    positions = token - starts[torch.searchsorted(starts, token, right=True) - 1]
    return turn(x, cos[positions][:, None], sin[positions][:, None])


TARGET = "rope_packed"
GIVEN = {"pairing": "half", "layout": "thd"}
