"""Matrices from ids whose last axis is time, height and width, of fixed sizes, as in Flux."""

import torch

SIZES = (16, 56, 56)


def embed(ids):
    """ids: `[batch, seq, 3]`. Return `[batch, 1, seq, 64, 2, 2]`."""
    of_axes = [
        ids[..., axis, None].double() * 10_000.0 ** (-torch.arange(0, SIZES[axis], 2).double() / SIZES[axis])
        for axis in range(ids.shape[-1])
    ]
    angles = torch.cat(of_axes, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2)).float().unsqueeze(1)


def apply_rope(xq, xk, freqs_cis):
    """xq and xk: `[batch, heads, seq, 128]`."""

    def rotated(x):
        pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
        return (freqs_cis[..., 0] * pairs[..., 0] + freqs_cis[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)

    return rotated(xq), rotated(xk)


TARGET = "embed,apply_rope"
GIVEN = {"head_dim": 128, "pairing": "interleaved"}
BUGS = {
    # The matrices are rounded.
    "low_precision_tables__of_three_axes": [(".float().unsqueeze(1)", ".half().unsqueeze(1)")],
}
