"""Tokens of several requests in one row with their positions, and a table that raises an error past its end."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_size, rotary_dim, max_position_embeddings, base):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
        angles = torch.outer(torch.arange(max_position_embeddings, dtype=torch.float32), inv_freq)
        self.rotary_dim = rotary_dim
        self.register_buffer("cache", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(self, positions, query, key):
        cos, sin = self.cache[positions].chunk(2, dim=-1)

        def rotated(x):
            head, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
            a, b = head.chunk(2, dim=-1)
            c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
            return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)

        return rotated(query), rotated(key)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "gpt_neox",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 2048,
    },
    "layout": "thd",
}
