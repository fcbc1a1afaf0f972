"""The fallback without a kernel passes cos and sin on as if they were angles (Megatron-LM pull request 7465)."""

import torch


def with_angles(t, angles):
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    first, second = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-second, first), dim=-1) * sin


def with_tables(t, cos, sin):
    cos, sin = (torch.cat((each, each), dim=-1).to(t.dtype) for each in (cos, sin))
    first, second = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-second, first), dim=-1) * sin


def apply(x, cos, sin):  # x: [batch, seq, heads, channels]
    cos, sin = cos[:, None], sin[:, None]
    return with_angles(x, torch.stack((cos, sin), dim=-1).flatten(-2))


TARGET = "apply"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("with_angles(x, torch.stack((cos, sin), dim=-1).flatten(-2))", "with_tables(x, cos, sin)"),
]
