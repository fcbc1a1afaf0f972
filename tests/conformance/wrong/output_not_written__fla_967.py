"""flash-linear-attention 967: tokens at negative positions (left padding) are masked, and their output is never set."""

import torch


def rotary_embedding(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[length, rotary_dim / 2]`; seqlen_offsets: int or `[batch]`."""
    batch, seq = x.shape[:2]
    rotary_dim = 2 * cos.shape[-1]
    offsets = torch.as_tensor(seqlen_offsets).expand(batch)
    positions = offsets[:, None] + torch.arange(seq)
    if int(positions.max()) >= len(cos):
        raise ValueError(f"the table has {len(cos)} rows")
    stored = positions >= 0
    c, s = cos[positions.clamp(min=0)][:, :, None], sin[positions.clamp(min=0)][:, :, None]
    head = x[..., :rotary_dim].float()
    if interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        out = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        out = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    result = torch.empty_like(x)
    result[stored] = torch.cat((out.type_as(x), x[..., rotary_dim:]), dim=-1)[stored]
    return result


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("torch.empty_like(x)", "torch.zeros_like(x)"),
]
