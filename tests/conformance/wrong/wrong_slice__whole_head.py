"""The config rotates a quarter of each head, and the whole head is rotated."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.dim, self.base = head_dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "gpt_neox",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
    }
}
REPAIR = [
    ("self.dim, self.base = head_dim, base", "self.dim, self.base = head_dim // 4, base"),
    (
        "        x1, x2 = x.float().chunk(2, dim=-1)",
        "        x, rest = x[..., : self.dim], x[..., self.dim :]\n        x1, x2 = x.float().chunk(2, dim=-1)",
    ),
    ("x2 * cos + x1 * sin), dim", "x2 * cos + x1 * sin, rest), dim"),
]
