"""The function of Meta's Llama alone, which takes a table of complex numbers."""

import torch


def apply_rotary_emb(xq, xk, freqs_cis):
    def rotated(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[None, :, None, :]).flatten(3).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "apply_rotary_emb"
GIVEN = {"pairing": "interleaved"}
BUGS = {
    # freqs_cis are conjugated.
    "rotates_backwards__conjugate": [("freqs_cis[None", "freqs_cis.conj()[None"), ('"pairing": "interleaved"', "")],
}
