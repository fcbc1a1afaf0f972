"""The memory of q and k is read as if the tensors were contiguous."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x):
        strides = torch.empty(x.shape, device="meta").stride()
        x = x.as_strided(x.shape, strides)
        return x * cos + rotate_half(x) * sin

    return rotated(q), rotated(k)


TARGET = "apply_rotary_pos_emb"
GIVEN = {}
REPAIR = [
    (
        '        strides = torch.empty(x.shape, device="meta").stride()\n        x = x.as_strided(x.shape, strides)\n',
        "",
    ),
]
