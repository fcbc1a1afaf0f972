"""The backward pass reads the first rows of the table, whatever the positions of the forward pass were."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, cos_sin_cache):
        ctx.save_for_backward(positions, cos_sin_cache)
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        positions, cos_sin_cache = ctx.saved_tensors
        positions = torch.arange(len(positions))
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        return turn(grad, cos, -sin), None, None


def rope(positions, query, key, cos_sin_cache):
    """query and key: `[tokens, heads, dim]`. Returns both, rotated."""
    return Rotate.apply(query, positions, cos_sin_cache), Rotate.apply(key, positions, cos_sin_cache)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("        positions = torch.arange(len(positions))\n", ""),
]
