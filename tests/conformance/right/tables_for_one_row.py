"""A function that computes tables from positions `[seq]`, which all rows share, for a function that applies them."""

import torch

DIM, BASE = 64, 10000.0


def make_tables(positions):
    freqs = BASE ** (-torch.arange(0, DIM, 2).float() / DIM)
    angles = torch.outer(positions.float(), freqs)
    return angles.cos()[:, None], angles.sin()[:, None]


def apply_rotary_emb(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


TARGET = "make_tables,apply_rotary_emb"
GIVEN = {"layout": "bshd", "pairing": "half", "base": BASE}
