"""The ramp is computed from max_position_embeddings, the scaled length."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        scaling, self.head_dim = config.rope_scaling, config.head_dim
        self.factor, self.base = scaling["factor"], config.rope_theta
        self.trained = config.max_position_embeddings

    def pair_of(self, turns):
        return self.head_dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def forward(self, x, positions):
        """x: `[batch, seq, heads, head_dim]`; positions: `[batch, seq]`."""
        pairs = torch.arange(self.head_dim // 2).float()
        inv_freq = self.base ** (-2 * pairs / self.head_dim)
        low, high = math.floor(self.pair_of(32)), math.ceil(self.pair_of(1))
        ramp = ((pairs - low) / (high - low)).clamp(0, 1)
        inv_freq = inv_freq / self.factor * ramp + inv_freq * (1 - ramp)
        angles = positions[:, :, None, None].float() * inv_freq
        size = 0.1 * math.log(self.factor) + 1
        cos, sin = angles.cos() * size, angles.sin() * size
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
}
REPAIR = [
    ("config.max_position_embeddings", 'scaling["original_max_position_embeddings"]'),
]
