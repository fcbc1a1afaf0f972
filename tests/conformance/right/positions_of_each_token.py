"""The form of FLUX: ids `[seq, axes]`, tables of all axes joined, and one function for q and k."""

import torch

from ropewalk import Axes, Rope


def tables(ids, axes_dim=(16, 24, 24), theta=10000.0):
    """ids: `[seq, axes]`. Returns cos and sin `[seq, channels / 2]`."""
    parts = []
    for axis, dim in enumerate(axes_dim):
        inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        parts.append(ids[:, axis, None].double() * inv_freq)
    angles = torch.cat(parts, dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(q, k, ids):
    """q and k: `[batch, heads, seq, dim]`; ids: `[seq, axes]`."""
    cos, sin = tables(ids)

    def rotated(x):
        pairs = x.float().unflatten(-1, (-1, 2))
        a, b = pairs.unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)

    return rotated(q), rotated(k)


TARGET = "rotate"
GIVEN = {
    "rope": Rope(64, 10000.0, "interleaved", axes=Axes.axial((16, 24, 24))),
    "layout": "bhsd",
}
