"""Tables of rotation matrices, computed from positions and sizes by a function, as in Flux."""

import torch


def rope(pos, dim, theta):
    """pos: `[batch, seq]`. Return `[batch, seq, dim / 2, 2, 2]`."""
    angles = pos[..., None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)), dim=-2).float()


def apply_rope(xq, xk, freqs_cis):
    """xq and xk: `[batch, heads, seq, dim]`; freqs_cis: `[batch, 1, seq, dim / 2, 2, 2]`."""

    def rotated(x):
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        return (freqs_cis * pairs).sum(dim=-1).flatten(-2).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "rope,apply_rope"
GIVEN = {"pairing": "interleaved", "base": 10000.0}
