"""The form of transformers until 4.36: a cached table, and a function that indexes it by the positions."""

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, dim, max_position_embeddings=2048, base=10000, device=None):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float().to(device) / dim))
        self.inv_freq, self.longest = inv_freq, 0

    def forward(self, x, seq_len=None):
        if seq_len > self.longest:
            self.longest = seq_len
            angles = torch.outer(torch.arange(seq_len).float(), self.inv_freq)
            angles = torch.cat((angles, angles), dim=-1)
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos[:seq_len].to(x.dtype), self.sin[:seq_len].to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "RotaryEmbedding,apply_rotary_pos_emb"
GIVEN = {"base": 10000.0, "pairing": "half"}
