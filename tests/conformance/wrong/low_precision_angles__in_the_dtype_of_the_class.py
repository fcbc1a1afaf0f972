"""The tables are computed in the dtype of the model, which the class takes, as in candle until June 2025."""

import torch


class RotaryEmbedding:
    def __init__(self, head_dim, base=10000.0, max_length=4096, dtype=torch.bfloat16):
        inv_freq = (base ** (-torch.arange(0, head_dim, 2) / head_dim)).to(dtype)
        angles = torch.arange(max_length).to(dtype)[:, None] * inv_freq
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, q, k, positions):
        """q and k: `[batch, heads, seq, channels]`."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]

        def turn(x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        return turn(q), turn(k)


TARGET = "RotaryEmbedding"
GIVEN = {}
REPAIR = [(" / head_dim)).to(dtype)", " / head_dim))"), ("max_length).to(dtype)", "max_length)")]
