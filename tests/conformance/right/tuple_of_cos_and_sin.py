"""The form of diffusers: one argument is a tuple of cos and sin, in which each column is repeated."""

import torch


def apply_rotary_emb(x, freqs_cis):
    cos, sin = freqs_cis
    cos, sin = cos[None, None], sin[None, None]
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    other = torch.stack((-b, a), dim=-1).flatten(3)
    return (x.float() * cos + other.float() * sin).to(x.dtype)


TARGET = "apply_rotary_emb"
GIVEN = {"pairing": "interleaved"}
