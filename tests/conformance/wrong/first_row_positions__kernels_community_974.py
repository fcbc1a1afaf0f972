"""kernels-community 974 (aiter-rope): all rows get the tables of the first, also if they are left-padded."""

import torch


def kernel(x, cos, sin):
    """x: `[seq, batch, heads, dim]`; cos and sin: `[seq, batch or 1, 1, dim / 2]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
    """q and k: `[batch, heads, seq, dim]`; cos and sin: `[batch, seq, dim]`."""
    half = cos.shape[-1] // 2
    rows = slice(0, 1)
    c, s = (t[rows, :, :half].transpose(0, 1).unsqueeze(2) for t in (cos, sin))
    if unsqueeze_dim == 1:
        q, k = kernel(q.permute(2, 0, 1, 3), c, s), kernel(k.permute(2, 0, 1, 3), c, s)
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)
    q, k = kernel(q.transpose(0, 1), c, s), kernel(k.transpose(0, 1), c, s)
    return q.transpose(0, 1), k.transpose(0, 1)


TARGET = "apply_rotary_transformers"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("rows = slice(0, 1)", "rows = slice(None)"),
]
