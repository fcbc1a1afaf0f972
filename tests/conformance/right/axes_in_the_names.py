"""Parameters whose names end with their axes, and half of the pairs do not rotate, as in modded-nanogpt."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, max_seq_len):
        super().__init__()
        inv_freq = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4)
        angles = torch.outer(torch.arange(max_seq_len), torch.cat((inv_freq, torch.zeros(dim // 4))))
        self.cos = torch.nn.Buffer(angles.cos(), persistent=False)
        self.sin = torch.nn.Buffer(angles.sin(), persistent=False)

    def forward(self, x_BTHD):  # noqa: N803
        cos, sin = (table[None, : x_BTHD.shape[1], None] for table in (self.cos, self.sin))
        a, b = x_BTHD.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHD)


TARGET = "Rotary"
GIVEN = {"pairing": "half"}
