"""As in ModernBERT: q, k and v are stacked, so that k cannot have fewer heads than q."""

import torch


def apply_rotary_unpadded(qkv, cos, sin, cu_seqlens):
    """qkv: `[tokens, 3, heads, dim]`; cos and sin: `[length, dim / 2]`."""
    positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    cos, sin = cos[positions][:, None, None], sin[positions][:, None, None]
    a, b = qkv[:, :2].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.type_as(qkv), qkv[:, 2:]), dim=1)


TARGET = "apply_rotary_unpadded"
GIVEN = {}
