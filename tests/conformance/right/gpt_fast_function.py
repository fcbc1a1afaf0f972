"""The function of gpt-fast and torchtune alone, which views its table as `[1, seq, 1, pairs, 2]`."""

import torch


def apply_rotary_emb(x, freqs_cis):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = freqs_cis.view(1, pairs.size(1), 1, pairs.size(3), 2)
    a, b = pairs.unbind(-1)
    cos, sin = table.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(3).type_as(x)


TARGET = "apply_rotary_emb"
GIVEN = {"pairing": "interleaved"}
BUGS = {
    # The second channel of each pair has the cosine where the sine belongs.
    "cos_and_sin_swapped__in_one_channel": [("b * cos + a * sin", "b * sin + a * cos")],
}
