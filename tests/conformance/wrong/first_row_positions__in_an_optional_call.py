"""A parameter for positions is optional, as in torchtitan. With it, all rows get the positions of the first."""

import torch


def tables(dim, max_seq_len, base=10000.0):
    angles = torch.arange(max_seq_len)[:, None] * base ** (-torch.arange(0, dim, 2).float() / dim)
    return torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), dim=-1)


def apply_rotary_emb(xq, xk, rope_cache, positions=None):
    """xq and xk: `[batch, seq, heads, head_dim]`; rope_cache: `[length, 2 · head_dim]`; positions: `[batch, seq]`."""
    rope_cache = rope_cache[None, : xq.shape[1]] if positions is None else rope_cache[positions[:1]]
    cos, sin = rope_cache[:, :, None].chunk(2, dim=-1)

    def rotated(x):
        a, b = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "tables,apply_rotary_emb"
GIVEN = {}
REPAIR = [
    ("rope_cache[positions[:1]]", "rope_cache[positions]"),
]
