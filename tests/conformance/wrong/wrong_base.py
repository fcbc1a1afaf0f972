"""The base of the config, 500000, is not read, and 10000 is used instead."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, getattr(config, "theta", 10000.0)

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
        "head_dim": 64,
    }
}
REPAIR = [
    ('getattr(config, "theta", 10000.0)', "config.rope_theta"),
]
