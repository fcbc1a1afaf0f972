"""Of heads that are wider than the rotated channels, q rotates the first ones and k the last ones."""

import torch


class PartialRotaryEmbedding(torch.nn.Module):
    def __init__(self, dim, max_seq_len, theta):
        super().__init__()
        inv_freq = theta ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(max_seq_len).float()[:, None] * inv_freq
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin())
        self.dim = dim

    def forward(self, q, k, position_offset=0):
        """q and k: `[batch, heads, seq, channels]`."""
        rows = position_offset + torch.arange(q.shape[-2])
        cos, sin = self.cos[rows].to(q.dtype), self.sin[rows].to(q.dtype)

        def turn(x):
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-b, a), dim=-1) * sin

        q_first, q_last = q.split((self.dim, q.shape[-1] - self.dim), dim=-1)
        k_first, k_last = k.split((k.shape[-1] - self.dim, self.dim), dim=-1)
        return torch.cat((turn(q_first), q_last), dim=-1), torch.cat((k_first, turn(k_last)), dim=-1)


TARGET = "PartialRotaryEmbedding"
GIVEN = {}
REPAIR = [
    (
        "k_first, k_last = k.split((k.shape[-1] - self.dim, self.dim), dim=-1)",
        "k_first, k_last = k.split((self.dim, k.shape[-1] - self.dim), dim=-1)",
    ),
    ("torch.cat((k_first, turn(k_last)), dim=-1)", "torch.cat((turn(k_first), k_last), dim=-1)"),
]
