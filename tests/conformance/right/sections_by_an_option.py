"""A class that is told by an option whether its sections are interleaved, as in SGLang's engine."""

import torch

from ropewalk import Axes, Rope


class Rotary:
    def __init__(self, head_size, rope_theta, mrope_section=(8, 12, 12), mrope_interleaved=False):
        self.inv_freq = rope_theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        self.sections, self.is_interleaved = mrope_section, mrope_interleaved

    def __call__(self, q, k, positions):
        """q and k: `[batch, seq, heads, head_dim]`; positions: `[axes, batch, seq]`."""
        axis = torch.repeat_interleave(torch.tensor(self.sections))
        if self.is_interleaved:
            axis = torch.zeros_like(axis)
            for i in (1, 2):
                axis[i : 3 * self.sections[i] : 3] = i
        angles = (positions[axis].movedim(0, -1) * self.inv_freq)[:, :, None]
        cos, sin = angles.cos(), angles.sin()

        def rotated(x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


TARGET = "Rotary"
GIVEN = {"rope": Rope(64, 10000.0, "half", axes=Axes.interleaved((12, 10, 10)))}
