"""The form of Meta's Llama: a table of complex numbers, which multiplies pairs of channels read as complex numbers."""

import torch


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(end, dtype=torch.float32), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[None, :, None, :]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "precompute_freqs_cis,apply_rotary_emb"
GIVEN = {"pairing": "interleaved"}
BUGS = {
    # The exponents begin at 1 / dim.
    "wrong_exponent__odd": [("arange(0, dim", "arange(1, dim")],
}
