"""Positions restart at the second sequence, but not at later ones."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_packed(x, cu_seqlens, cos, sin):
    """x: `[tokens, heads, dim]`, all sequences behind each other; cos and sin: `[longest sequence, dim / 2]`."""
    starts = cu_seqlens.long()
    positions = torch.arange(len(x))
    boundaries = starts[1:2]
    for start in boundaries.tolist():
        positions[start:] = torch.arange(len(x) - start)
    positions = positions.clamp(max=len(cos) - 1)
    return turn(x, cos[positions][:, None], sin[positions][:, None])


TARGET = "rope_packed"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("starts[1:2]", "starts[1:-1]"),
]
