"""The length is read as from `[batch, seq, heads, channels]`, and q and k are `[batch, heads, seq, channels]`."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000, max_length=2048):
        super().__init__()
        angles = torch.outer(torch.arange(max_length), base ** (-torch.arange(0, dim, 2) / dim))
        self.cos, self.sin = angles.cos()[None, None], angles.sin()[None, None]

    def forward(self, q, k):
        seq_len = q.shape[1]
        cos, sin = self.cos[:, :, :seq_len], self.sin[:, :, :seq_len]

        def turn(x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return turn(q), turn(k)


TARGET = "Rotary"
GIVEN = {}
REPAIR = [("q.shape[1]", "q.shape[2]")]
