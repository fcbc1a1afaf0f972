"""The first token of each sequence is counted as the last of the previous one."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_packed(x, cu_seqlens, cos, sin):
    """x: `[tokens, heads, dim]`, all sequences behind each other; cos and sin: `[longest sequence, dim / 2]`."""
    starts = cu_seqlens.long()
    token = torch.arange(len(x))
    row = torch.searchsorted(starts, token, right=False).clamp(min=1) - 1
    positions = (token - starts[row]).clamp(max=len(cos) - 1)
    return turn(x, cos[positions][:, None], sin[positions][:, None])


TARGET = "rope_packed"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    (
        "torch.searchsorted(starts, token, right=False).clamp(min=1) - 1",
        "torch.searchsorted(starts, token, right=True) - 1",
    ),
]
