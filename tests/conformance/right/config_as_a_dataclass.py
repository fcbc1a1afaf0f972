"""A function whose only argument is a dataclass of the program itself, which has other fields than the config."""

from dataclasses import dataclass

import torch

from ropewalk import Rope


@dataclass
class ModelArgs:
    n_layers: int = 2
    rope_dim: int = 64
    rope_theta: float = 10000.0
    max_seq_len: int = 4096


def precompute(args: ModelArgs):
    inv_freq = args.rope_theta ** (-torch.arange(0, args.rope_dim, 2).float() / args.rope_dim)
    angles = torch.outer(torch.arange(args.max_seq_len), inv_freq)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, freqs_cis):
    """x: `[batch, seq, heads, dim]`."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs_cis.view(1, x.shape[1], 1, -1)).flatten(-2).type_as(x)


TARGET = "precompute,rotate"
GIVEN = {"rope": Rope(128, 500_000.0, "interleaved")}
