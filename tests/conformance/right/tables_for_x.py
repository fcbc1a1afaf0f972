"""A class that computes tables for the tokens of x and caches the longest, with an axis for the heads."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.dim, self.base, self.kept = dim, base, None

    def forward(self, x):
        if self.kept is None or self.kept[0].shape[1] < x.shape[1]:
            freqs = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
            angles = torch.outer(torch.arange(x.shape[1]).float(), freqs)
            self.kept = angles.cos()[None, :, None], angles.sin()[None, :, None]
        return tuple(table[:, : x.shape[1]] for table in self.kept)


def apply_rotary_emb(x, cos, sin):
    half = x.shape[3] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 3).type_as(x)


TARGET = "Rotary,apply_rotary_emb"
GIVEN = {"layout": "bshd"}

BUGS = {
    # The cache is real, so that the sines of complex tables are lost after the first call.
    "earlier_calls_matter__sines_are_lost": [
        (
            "        return tuple(",
            "        kept, self.kept = self.kept, (self.kept[0], 0 * self.kept[1])\n        return tuple(",
        ),
        ("in self.kept)", "in kept)"),
    ],
}
