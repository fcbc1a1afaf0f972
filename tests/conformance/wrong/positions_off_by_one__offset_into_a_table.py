"""From an offset on, the rows of the table begin one too late. Without an offset, they begin at 0."""

import torch


def build_rope_cache(seq_len, n_elem, base=10000.0):
    inv_freq = base ** (-torch.arange(0, n_elem, 2).float() / n_elem)
    angles = torch.arange(seq_len).float()[:, None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles)


def apply_rope(x, rope_cache, start_pos=0):
    """x: `[batch, seq, heads, channels]`."""
    first = start_pos + 1 if start_pos > 0 else 0
    rows = rope_cache[first : first + x.shape[1]][None, :, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rows).flatten(-2).type_as(x)


TARGET = "build_rope_cache,apply_rope"
GIVEN = {"layout": "bshd"}
REPAIR = [("start_pos + 1 if start_pos > 0 else 0", "start_pos")]
