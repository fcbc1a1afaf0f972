"""A rotation with a bug that `ropewalk check` finds. It agrees with Llama 3.1 at short distances."""

import torch


def rotate(q, k, positions):
    freqs = 500_000.0 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angles = torch.outer(positions.float(), freqs).repeat(1, 2)
    return tuple((x * angles.cos() + half(x) * angles.sin()).type_as(x) for x in (q, k))


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)
