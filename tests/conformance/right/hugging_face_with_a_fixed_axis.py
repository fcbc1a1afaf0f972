"""A class that computes tables for each row, and Hugging Face's function with a fixed axis for the heads."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, x, position_ids):
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = position_ids[:, :, None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {"pairing": "half"}
BUGS = {
    # The tables have an axis for the rows of the batch, but are computed only for the first row of positions.
    "first_row_positions__one_row_of_tables": [("position_ids[:, :, None]", "position_ids[:1, :, None]")],
    # The tables have no axis for the rows of the batch, and are computed for the first row of positions.
    "first_row_positions__tables_without_rows": [("position_ids[:, :, None]", "position_ids[0][:, None]")],
    # The tables are for half pairing, but the function pairs neighbours: repeat is used instead of repeat_interleave.
    "mixed_pairings": [
        ("x.chunk(2, dim=-1)", "x[..., 0::2], x[..., 1::2]"),
        ("torch.cat((-second, first), dim=-1)", "torch.stack((-second, first), dim=-1).flatten(-2)"),
        ('GIVEN = {"pairing": "half"}', "GIVEN = {}"),
    ],
    # The tables are for interleaved pairing, but the function pairs the halves.
    "mixed_pairings__interleaved_tables": [
        ("torch.cat((angles, angles), dim=-1)", "angles.repeat_interleave(2, dim=-1)"),
        ('GIVEN = {"pairing": "half"}', "GIVEN = {}"),
    ],
    # The rows of the cosines meet the heads, which one row does not show.
    "rows_mixed_up__with_heads": [("cos.unsqueeze(1), sin", "cos.unsqueeze(0), sin")],
}
