"""The tokens of each document are counted from 1, in a function that reads the rows of a table by them."""

import torch


def apply_rotary_varlen(x, cos, sin, cu_seqlens):
    """x: `[tokens, heads, head_dim]`. cos and sin: `[length, head_dim / 2]`."""
    tokens = torch.arange(len(x))
    of = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    rows = tokens - cu_seqlens[of] + 1
    cos, sin = cos[rows][:, None], sin[rows][:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


TARGET = "apply_rotary_varlen"
GIVEN = {}
REPAIR = [("cu_seqlens[of] + 1", "cu_seqlens[of]")]
