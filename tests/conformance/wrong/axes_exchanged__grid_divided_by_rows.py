"""The index of a cell is divided by the number of rows of the grid, and not of columns."""

import torch


def rotate(q, k, height, width):
    """q and k: `[batch, height * width, heads, dim]`."""
    count = q.shape[-1] // 4
    inv_freq = 100.0 ** (-torch.arange(count).float() / count)
    cells = torch.arange(height * width)
    row, column = cells // height, cells % height
    angles = torch.cat((row[:, None] * inv_freq, column[:, None] * inv_freq), dim=-1)[:, None]
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    return rotated(q), rotated(k)


TARGET = "rotate"
GIVEN = {}
REPAIR = [("cells // height, cells % height", "cells // width, cells % width")]
