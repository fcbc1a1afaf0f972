"""DeepSeek's form: only the last 64 of 192 channels are rotated, in interleaved pairs."""

import torch

from ropewalk import Rope


class Rotary(torch.nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def forward(self, q, positions):
        """q: `[batch, seq, heads, 192]`; positions: `[batch, seq]`."""
        angles = positions[:, :, None, None] * self.base ** (-torch.arange(32, dtype=torch.float64) / 32)
        a, b = q[..., 128::2].float(), q[..., 129::2].float()
        cos, sin = angles.cos().float(), angles.sin().float()
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((q[..., :128], turned.type_as(q)), dim=-1)


TARGET = "Rotary"
GIVEN = {"rope": Rope(192, 10000.0, "interleaved", rotary_dim=64, rotary_offset=128)}
BUGS = {
    # All tokens get the position of the first, which looks like one of several axes.
    "one_position__of_the_first": [("positions[:, :, None, None]", "positions[:, :1, None, None]")],
}
