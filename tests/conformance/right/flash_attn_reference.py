"""The form of flash-attn's reference: a function of one tensor and half-width tables, for both pairings."""

import torch


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    rotary_dim = cos.shape[-1] * 2
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        other = torch.stack((-head[..., 1::2], head[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    return torch.cat((head * cos + other * sin, rest), dim=-1)


TARGET = "apply_rotary_emb_torch"
GIVEN = {"pairing": "half"}
