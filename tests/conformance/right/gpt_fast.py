"""The form of gpt-fast: cos and sin are stacked in one real table."""

import torch


def precompute_freqs_cis(seq_len, n_elem, base=10000, dtype=torch.float32):
    freqs = base ** (-torch.arange(0, n_elem, 2).float() / n_elem)
    angles = torch.outer(torch.arange(seq_len).float(), freqs)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(dtype)


def apply_rotary_emb(x, freqs_cis):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = freqs_cis.view(1, pairs.size(1), 1, pairs.size(3), 2)
    rotated = torch.stack(
        (
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ),
        dim=-1,
    )
    return rotated.flatten(3).type_as(x)


TARGET = "precompute_freqs_cis,apply_rotary_emb"
GIVEN = {"pairing": "interleaved"}
