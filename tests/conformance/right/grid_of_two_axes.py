"""A grid of rows and columns, with a progression of frequencies for each."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0):
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        half = pairs // 2
        inv_freq = self.base ** (-torch.arange(half, dtype=torch.float64) / half)
        rows, columns = positions[..., None] * inv_freq
        angles = torch.cat((rows, columns), dim=-1)
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.axial((32, 32)))}
BUGS = {
    # The first half of the pairs uses the columns of the grid and the second half the rows.
    "axes_exchanged__grid": [("(rows, columns)", "(columns, rows)")],
    # Each axis restarts, but divides the exponents by the whole head, so it lacks the slow half of the frequencies.
    "axis_frequencies__exponents_of_the_whole_head": [("/ half", "/ pairs")],
    # One progression runs over rows and columns, but each axis has one of its own.
    "axis_frequencies__one_progression_for_a_grid": [
        ("half = pairs // 2", "half = pairs"),
        ("(rows, columns)", "(rows[..., : pairs // 2], columns[..., pairs // 2 :])"),
    ],
    # Only the sines are rounded.
    "low_precision_tables__of_two_axes": [("angles.sin().float()", "angles.sin().bfloat16()")],
}
