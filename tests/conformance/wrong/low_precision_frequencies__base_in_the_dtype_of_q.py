"""The base is a tensor of q's dtype: in bfloat16, 10000 is 9984."""

import torch


def turn(x, inv_freq, offset):
    angles = (offset + torch.arange(x.shape[1])).float()[:, None, None] * inv_freq
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1).type_as(x)


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, max_period=10000.0):
        super().__init__()
        self.max_period = max_period

    def forward(self, q, k, offset):
        """q and k: `[batch, seq, heads, channels]`."""
        base = q.new_full((), self.max_period).float()
        inv_freq = base ** (-torch.arange(0, q.shape[-1], 2).float() / q.shape[-1])
        return turn(q, inv_freq, offset), turn(k, inv_freq, offset)


TARGET = "RotaryEmbedding"
GIVEN = {}
REPAIR = [("q.new_full((), self.max_period).float()", "torch.tensor(self.max_period)")]
