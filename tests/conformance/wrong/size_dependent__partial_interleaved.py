"""In the other pairing, a part of the head is rotated by the columns of the whole head."""

import torch


def rope(q, k, positions, cos_sin_cache, is_neox=True):
    """q and k: `[tokens, heads, dim]`; cos_sin_cache: `[length, rotary_dim]`."""
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def turn(x):
        part, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
        if is_neox:
            a, b = part.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)
        columns = torch.arange(rotary_dim // 2) * x.shape[-1] // rotary_dim % (rotary_dim // 2)
        c, s = cos[..., columns], sin[..., columns]
        a, b = part[..., ::2], part[..., 1::2]
        return torch.cat((torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2), rest), dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "rope"
GIVEN = {"layout": "thd", "pairing": "interleaved"}
REPAIR = [
    ("* x.shape[-1] // rotary_dim % (rotary_dim // 2)", ""),
]
