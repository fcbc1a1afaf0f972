"""Neighbouring channels are paired, but the weights of a Llama need the half pairing."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq

        x1, x2 = x.float()[..., 0::2], x.float()[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
    }
}
REPAIR = [
    ("x.float()[..., 0::2], x.float()[..., 1::2]", "x.float().chunk(2, dim=-1)"),
    (
        "torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)",
        "torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)",
    ),
]
