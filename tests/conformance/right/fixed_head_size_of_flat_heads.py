"""Heads of 64 channels, into which all channels of a token are split."""

import torch

INV_FREQ = 10000.0 ** (-torch.arange(0, 64, 2).float() / 64)


def rotate(x, position_ids):
    """x: `[batch, heads, seq, 64]`."""
    heads = x.transpose(1, 2).flatten(2).unflatten(2, (-1, 64))
    angles = position_ids[..., None, None] * INV_FREQ
    a, b = heads.chunk(2, dim=-1)
    out = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
    return out.flatten(2).unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2).type_as(x)


TARGET = "rotate"
GIVEN = {"base": 10000.0, "layout": "bhsd"}
