"""Flat q and k are parts of a fused qkv, but the step between tokens is taken to be their width."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotate_inplace(positions, query, key, head_size, cos_sin_cache):
    """query and key: `[tokens, heads · head_size]`, changed in place; the step between tokens may be larger."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    for x in (query, key):
        width = x.shape[-1]
        rows = x.detach().as_strided(x.shape, (width, 1))
        rows.copy_(turn(rows.unflatten(-1, (-1, head_size)), cos, sin).flatten(1))


TARGET = "rotate_inplace"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("width = x.shape[-1]", "width = x.stride(0)"),
]
