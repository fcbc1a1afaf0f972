"""The number of tokens is rounded up to a multiple of four, and the tokens past the end are written as well."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def memory(x):
    """The rows of x and all rows that follow them in memory, to the end of its storage."""
    length = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    rows = (length - x.shape[1]) // x.stride(0) + 1
    return x.detach().as_strided((rows, x.shape[1]), (x.stride(0), 1))


def rotate_inplace(positions, query, key, head_size, cos_sin_cache):
    """query and key: `[tokens, heads · head_size]`, changed in place."""
    tokens = len(positions)
    padded = -(-tokens // 4) * 4
    at = torch.nn.functional.pad(positions, (0, padded - tokens), value=1)
    cos, sin = cos_sin_cache[at][:, None].chunk(2, dim=-1)
    for x in (query, key):
        rows = memory(x)[:padded]
        heads = rows.unflatten(-1, (-1, head_size))
        rows.copy_(turn(heads, cos[: len(rows)], sin[: len(rows)]).flatten(1))


TARGET = "rotate_inplace"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("-(-tokens // 4) * 4", "tokens"),
]
