"""The cosines are those from the offset on, and the sines those of the first rows of the table."""

import torch


class RotaryPositionalEncoding(torch.nn.Module):
    def __init__(self, d_head, max_seq_len, base=10000.0):
        super().__init__()
        angles = torch.arange(max_seq_len)[:, None] * base ** (-torch.arange(0, d_head, 2).float() / d_head)
        self.register_buffer("cos_angles", angles.cos())
        self.register_buffer("sin_angles", angles.sin())

    def forward(self, q, k, offset=0):
        """q and k: `[batch, heads, seq, d_head]`."""
        rows = torch.arange(q.shape[-2])
        cos, sin = self.cos_angles[offset + rows], self.sin_angles[rows]

        def turn(x):
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)

        return turn(q), turn(k)


TARGET = "RotaryPositionalEncoding"
GIVEN = {}
REPAIR = [("self.sin_angles[rows]", "self.sin_angles[offset + rows]")]
