"""vLLM Ascend 12723: sin is read where it would start in a table padded to a power of two.

A head of 192 channels has cos in the first 96 columns of the table and sin from column 96 on; the kernel reads it from
column 128 on, past the end of the row.
"""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """query and key: `[tokens, heads · head_size]`. Returns both, rotated."""
    rotary_dim = cos_sin_cache.shape[-1]
    half, padded = rotary_dim // 2, 1 << (rotary_dim - 1).bit_length()
    rows = torch.cat((cos_sin_cache[positions], torch.zeros(len(positions), padded)), dim=-1)
    cos, sin = rows[:, None, :half], rows[:, None, padded // 2 : padded // 2 + half]

    def rotated(x):
        heads = x.view(len(positions), -1, head_size)
        head, rest = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        if is_neox:
            a, b = head.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = head[..., ::2], head[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((out.type_as(x), rest), dim=-1).view_as(x)

    return rotated(query), rotated(key)


TARGET = "rotary_embedding"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("padded // 2 : padded // 2 + half", "half:rotary_dim"),
]
