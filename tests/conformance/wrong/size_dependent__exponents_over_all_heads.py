"""The exponents are divided by the width of all heads, so that another number of heads has other frequencies."""

import torch


def apply_rope(q, k, n_heads, base=10000.0):
    """q and k: `[batch, seq, width of all heads]`."""

    def turn(x):
        width = x.shape[-1]
        heads = x.unflatten(-1, (-1, q.shape[-1] // n_heads))
        inv_freq = base ** (-torch.arange(0, heads.shape[-1], 2).float() / width)
        angles = torch.arange(x.shape[1])[:, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        a, b = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-3).type_as(x)

    return turn(q), turn(k)


TARGET = "apply_rope"
GIVEN = {"layout": "bshd"}
REPAIR = [(".float() / width)", ".float() / heads.shape[-1])")]
