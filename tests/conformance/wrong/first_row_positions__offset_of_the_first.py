"""With an offset for each row of the batch, that of the first row is used for all."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def apply_rotary_emb(x, cos, sin, seqlen_offsets=0):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[length, dim / 2]`; seqlen_offsets: int or `[batch]`."""
    offsets = torch.as_tensor(seqlen_offsets).reshape(-1)[:1]
    at = offsets[:, None] + torch.arange(x.shape[1])
    return turn(x, cos[at].unsqueeze(2), sin[at].unsqueeze(2))


TARGET = "apply_rotary_emb"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("reshape(-1)[:1]", "reshape(-1)"),
]
