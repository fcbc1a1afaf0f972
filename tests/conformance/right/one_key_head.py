"""The part of a head that is rotated in MLA: k has exactly one head."""

import torch


def rotate(q_pe, k_pe, cos, sin):
    """q_pe: `[batch, seq, heads, dim]`; k_pe: `[batch, seq, 1, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    if k_pe.shape[2] != 1:
        raise ValueError("k_pe must have one head")
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    return rotated(q_pe), rotated(k_pe)


TARGET = "rotate"
GIVEN = {"pairing": "interleaved", "layout": "bshd"}
BUGS = {
    # Only the cosines are those of the first row.
    "first_row_positions__of_cos": [("cos[:, :, None]", "cos[:1, :, None]")],
}
