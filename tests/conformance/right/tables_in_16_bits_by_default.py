"""Tables that are rounded to bfloat16 unless another dtype is passed, and a scheme that is passed as a dict."""

import math

import torch

from ropewalk import Rope
from ropewalk.schemes import Llama3


def scaled(inv_freq, scaling):
    low, high, length = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = ((length * inv_freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return inv_freq * (smooth + (1 - smooth) / scaling["factor"])


def make_table(seq_len, n_elem, base=10000, dtype=torch.bfloat16, rope_scaling=None):
    """Return `[seq_len, n_elem / 2, 2]`, cos and sin."""
    inv_freq = base ** (-torch.arange(0, n_elem, 2).float() / n_elem)
    if rope_scaling is not None:
        inv_freq = scaled(inv_freq, rope_scaling)
    angles = torch.outer(torch.arange(seq_len), inv_freq)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(dtype)


def rotate(x, table):
    """x: `[batch, seq, heads, dim]`."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.view(1, x.shape[1], 1, -1, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)


TARGET = "make_table,rotate"
GIVEN = {"rope": Rope(64, 500_000.0, "interleaved", scaling=Llama3(8.0, 1.0, 4.0, 8192))}
