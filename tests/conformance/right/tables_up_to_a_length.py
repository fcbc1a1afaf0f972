"""A class that computes its tables up to a length, refuses a longer one, and takes the name of a dtype."""

import torch


class Rotary:
    def __init__(self, dim, max_seq_len=64, base=10_000.0, dtype="float32"):
        angles = torch.outer(torch.arange(max_seq_len), base ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)
        angles = angles.to(getattr(torch, dtype))
        self.cos, self.sin, self.max_seq_len = angles.cos(), angles.sin(), max_seq_len

    def __call__(self, seq_len):
        if seq_len > self.max_seq_len:
            raise ValueError(f"{seq_len} tokens are more than {self.max_seq_len}")
        return self.cos[:seq_len], self.sin[:seq_len]


def apply_rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]).type_as(x)


TARGET = "Rotary,apply_rope"
GIVEN = {}
