"""The function slices whole tables by the size of the axis of the heads (LLMs-from-scratch issue 411)."""

import torch


def make_tables(head_dim, base=10000, context_length=4096):
    inv_freq = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(context_length), inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x: `[batch, seq, heads, channels]`."""
    seq_len = x.shape[2]
    cos, sin = cos[:seq_len].unsqueeze(0).unsqueeze(0), sin[:seq_len].unsqueeze(0).unsqueeze(0)
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)


TARGET = "make_tables,rotate"
GIVEN = {"layout": "bshd"}
REPAIR = [
    ("seq_len = x.shape[2]", "seq_len = x.shape[1]"),
    ("cos[:seq_len].unsqueeze(0).unsqueeze(0)", "cos[:seq_len].unsqueeze(1)"),
    ("sin[:seq_len].unsqueeze(0).unsqueeze(0)", "sin[:seq_len].unsqueeze(1)"),
]
