"""All rows begin at the offset of the first if the offset is a tensor. One number is right."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, q, k, seqlen_offset=0):
        """q and k: `[batch, seq, heads, dim]`; seqlen_offset: int or `[batch]`."""
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        offset = seqlen_offset[:1, None] if torch.is_tensor(seqlen_offset) else seqlen_offset
        positions = (torch.arange(q.shape[1]) + offset).expand(q.shape[:2])
        angles = positions[:, :, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return turn(q), turn(k)


TARGET = "Rotary"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("seqlen_offset[:1, None]", "seqlen_offset[:, None]"),
]
