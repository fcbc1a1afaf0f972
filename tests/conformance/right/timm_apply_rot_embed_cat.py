"""As `apply_rot_embed_cat` in timm: one table of sin, then of cos, each with a column for every channel."""

import torch


def apply_rot_embed_cat(x, emb, half=False):
    sin, cos = emb.chunk(2, dim=-1)
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


TARGET = "apply_rot_embed_cat"
GIVEN = {}
