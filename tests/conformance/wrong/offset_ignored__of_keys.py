"""The offsets of all rows, in a tensor with a name for one offset, are added to the positions of q alone."""

import torch


def apply_rope(q, k, offset, max_period=10000.0):
    """q and k: `[batch, heads, seq, dim]`; offset: `[batch]`."""

    def rotated(x, first):
        inv_freq = max_period ** (-torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
        places = first.float().view(-1, 1, 1, 1) + torch.arange(x.shape[2])[:, None]
        cos, sin = (places * inv_freq).cos(), (places * inv_freq).sin()
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)

    return rotated(q, offset), rotated(k, torch.zeros_like(offset))


TARGET = "apply_rope"
GIVEN = {"pairing": "interleaved", "base": 10000.0}
REPAIR = [
    ("torch.zeros_like(offset)", "offset"),
]
