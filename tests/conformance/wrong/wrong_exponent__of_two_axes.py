"""The exponents of both axes are twice as large as they should be."""

import torch


class Rope2d:
    def __init__(self, head_dim, base=10000.0):
        quarter = head_dim // 4
        self.inv_freq = base ** (-2 * torch.arange(quarter) / quarter)

    def __call__(self, x, row_ids, col_ids):
        """x: `[batch, tokens, heads, head_dim]`. The positions of each axis: `[batch, tokens]`."""
        parts = []
        for part, ids in zip(x.float().chunk(2, dim=-1), (row_ids, col_ids), strict=True):
            angles = ids[..., None, None] * self.inv_freq
            a, b = part.chunk(2, dim=-1)
            parts += [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.cat(parts, dim=-1).type_as(x)


TARGET = "Rope2d"
GIVEN = {"base": 10_000.0}
REPAIR = [("-2 * torch", "-torch")]
