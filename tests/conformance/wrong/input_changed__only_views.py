"""contiguous() does not copy a view of [batch, seq, heads, dim], so the input is overwritten."""

import torch


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)

    def rotated(x):
        x = x.transpose(1, 2).contiguous()
        with torch.no_grad():
            x.copy_(x * cos + rotate_half(x) * sin)
        return x.transpose(1, 2)

    return rotated(q), rotated(k)


TARGET = "apply_rotary_pos_emb"
GIVEN = {"layout": "bhsd"}
REPAIR = [
    (
        """        with torch.no_grad():
            x.copy_(x * cos + rotate_half(x) * sin)
        return x""",
        "        return (x * cos + rotate_half(x) * sin)",
    )
]
