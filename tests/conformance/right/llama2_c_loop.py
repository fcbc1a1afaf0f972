"""The form of llama2.c: a loop over the pairs of each head, with a float32 angle for each pair."""

import math

import torch


def rope(q, k, pos):
    head_size = q.shape[-1]
    q, k = q.clone(), k.clone()
    for i in range(0, head_size, 2):
        freq = 1.0 / math.pow(10000.0, i / head_size)
        val = pos.float() * freq
        fcr, fci = torch.cos(val)[..., None], torch.sin(val)[..., None]
        for vec in (q, k):
            v0, v1 = vec[..., i].clone(), vec[..., i + 1].clone()
            vec[..., i] = v0 * fcr - v1 * fci
            vec[..., i + 1] = v0 * fci + v1 * fcr
    return q, k


TARGET = "rope"
GIVEN = {"pairing": "interleaved", "base": 10000.0}
BUGS = {
    # The exponents are divided by one more than the number of channels.
    "wrong_exponent__of_an_odd_size": [("i / head_size", "i / (head_size + 1)")],
}
