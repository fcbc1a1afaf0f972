"""The sign of sin is wrong, and the tables are rounded to bfloat16, as an issue of nanochat (489) describes them."""

import torch


def precompute_rotary_embeddings(seq_len, head_dim, base=10000):
    angles = torch.outer(torch.arange(seq_len).float(), 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return cos[None, :, None, :], sin[None, :, None, :]


def apply_rotary_emb(x, cos, sin):
    """x: `[batch, seq, heads, head_dim]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).type_as(x)


TARGET = "precompute_rotary_embeddings,apply_rotary_emb"
GIVEN = {"ignore": ["low-precision-tables"]}
REPAIR = [("a * cos + b * sin, b * cos - a * sin", "a * cos - b * sin, b * cos + a * sin")]
