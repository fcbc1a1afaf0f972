"""The form of Meta's Llama, with the conjugate of freqs_cis."""

import torch


def apply_rotary_emb(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis.conj()[None, :, None]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "apply_rotary_emb"
GIVEN = {}
REPAIR = [
    (".conj()", ""),
]
