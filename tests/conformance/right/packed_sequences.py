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
BUGS = {
    # The first token of each sequence is counted as the last of the previous one.
    "segments_ignored__boundary_of_the_previous": [
        ("right=True) - 1]", "right=False).clamp(min=1) - 1]\n    positions = positions.clamp(max=len(cos) - 1)"),
    ],
    # cu_seqlens are accepted, but positions count through all sequences.
    "segments_ignored__one_count": [
        ("starts = cu_seqlens.long()", "starts = 0 * cu_seqlens.long()"),
        ("[positions][:, None], sin[positions]", "[positions % len(cos)][:, None], sin[positions % len(cos)]"),
    ],
    # Positions restart at the second sequence, but not at later ones.
    "segments_ignored__only_the_first_boundary": [
        ("starts = cu_seqlens.long()", "starts = cu_seqlens.long()[:2]"),
        ("[positions][:, None], sin[positions]", "[positions % len(cos)][:, None], sin[positions % len(cos)]"),
    ],
}
