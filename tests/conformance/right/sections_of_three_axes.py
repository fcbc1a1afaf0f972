"""Time, height and width in contiguous sections of one progression of frequencies."""

import torch

from ropewalk import Axes, Rope


class Rotary(torch.nn.Module):
    def __init__(self, head_dim=64, base=10000.0, mrope_section=(8, 12, 12)):
        super().__init__()
        self.head_dim, self.base, self.sections = head_dim, base, mrope_section

    def forward(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        pairs = self.head_dim // 2
        inv_freq = self.base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        t, h, w = positions[..., None] * inv_freq
        first, second = self.sections[0], self.sections[0] + self.sections[1]
        angles = torch.cat((t[..., :first], h[..., first:second], w[..., second:]), dim=-1)
        cos, sin = angles.cos().float()[:, :, None], angles.sin().float()[:, :, None]

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.sections((8, 12, 12)))}
BUGS = {
    # Height and width are exchanged: the positions are in the order time, height, width.
    "axes_exchanged__contiguous": [("t, h, w =", "t, w, h =")],
    # Each section starts with the highest frequency again, as in a grid, but one progression runs over all.
    "axis_frequencies__restart_in_each_section": [
        ("h[..., first:second], w[..., second:]", "h[..., : self.sections[1]], w[..., : self.sections[2]]"),
    ],
    # Positions of three axes are accepted, but only the first is used.
    "axis_ignored__only_time": [("positions[..., None]", "positions[[0, 0, 0], ..., None]")],
    # The section of the width is copied from the height, a mistake of copy and paste.
    "axis_ignored__width": [("w[..., second:]", "h[..., second:]")],
    # The positions of the first row of the batch are used for all rows, on every axis.
    "first_row_positions__three_axes": [("positions[..., None]", "positions[:, :1, :, None]")],
    # The sections are contiguous, but the model was trained with interleaved axes.
    "section_layout__contiguous": [
        ("section=(8, 12, 12)", "section=(12, 10, 10)"),
        ("Axes.sections((8, 12, 12))", "Axes.interleaved((12, 10, 10))"),
    ],
    # The axes are interleaved, but the model was trained with contiguous sections.
    "section_layout__interleaved": [
        (
            "torch.cat((t[..., :first], h[..., first:second], w[..., second:]), dim=-1)",
            "t.clone()\n        angles[..., 1::3], angles[..., 2::3] = h[..., 1::3], w[..., 2::3]",
        ),
    ],
    # mojo_opset 276: the interleaving goes on past the sections, to pairs that all use time.
    "section_layout__mojo_opset_276": [
        (
            "torch.cat((t[..., :first], h[..., first:second], w[..., second:]), dim=-1)",
            "t.clone()\n        angles[..., 1::3], angles[..., 2::3] = h[..., 1::3], w[..., 2::3]",
        ),
        ("Axes.sections((8, 12, 12))", "Axes.interleaved((15, 9, 8))"),
    ],
    # Of the interleaved pairs, those of the height use the column, and those of the width the row.
    "axes_exchanged__interleaved": [
        ("section=(8, 12, 12)", "section=(12, 10, 10)"),
        ("Axes.sections((8, 12, 12))", "Axes.interleaved((12, 10, 10))"),
        ("t, h, w =", "t, w, h ="),
        (
            "torch.cat((t[..., :first], h[..., first:second], w[..., second:]), dim=-1)",
            "t.clone()\n        angles[..., 1:30:3], angles[..., 2:30:3] = h[..., 1:30:3], w[..., 2:30:3]",
        ),
    ],
    # The queries use all three axes, and the keys only time, so images are placed differently in q and k.
    "key_unlike_query__positions_of_time": [
        ("def forward(self, q, k, positions):", "def rotated(self, x, positions):"),
        (
            "return rotated(q), rotated(k)",
            "return rotated(x)\n\n    def forward(self, q, k, positions):\n"
            "        return self.rotated(q, positions), self.rotated(k, positions[[0, 0, 0]])",
        ),
    ],
}
