"""Tables of each axis are passed with the positions, as in references of kernels. Two axes are exchanged."""

import torch

from ropewalk import Axes, Rope


def mrope(positions, query, key, cos, sin, mrope_section, head_size):
    """query and key: `[tokens, heads * head_size]`. cos and sin: `[3, tokens, head_size / 2]`."""
    order = (0, 2, 1) if positions.ndim == 2 else ()
    cos, sin = (
        torch.cat([x[order[i]] for i, x in enumerate(t.split(mrope_section, dim=-1))], dim=-1)[:, None]
        for t in (cos, sin)
    )

    def turn(x):
        a, b = x.view(len(x), -1, head_size).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).view_as(x).type_as(x)

    return turn(query), turn(key)


TARGET = "mrope"
GIVEN = {"rope": Rope(64, 10_000.0, "half", axes=Axes.sections([8, 12, 12]))}
REPAIR = [("(0, 2, 1)", "(0, 1, 2)")]
