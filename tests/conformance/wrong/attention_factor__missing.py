"""YaRN without its attention factor."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta
        self.scaling = config.rope_scaling

    def forward(self, x, positions):
        s = self.scaling
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)

        def turns(n):
            return (
                self.dim
                * math.log(s["original_max_position_embeddings"] / (n * 2 * math.pi))
                / (2 * math.log(self.base))
            )

        low, high = math.floor(turns(32)), math.ceil(turns(1))
        ramp = ((torch.arange(self.dim // 2).float() - low) / (high - low)).clamp(0, 1)
        inv_freq = inv_freq * (1 - ramp) + inv_freq / s["factor"] * ramp
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
        "head_dim": 64,
        "rope_theta": 500000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    }
}
REPAIR = [
    (
        "cos, sin = angles.cos(), angles.sin()",
        'factor = 0.1 * math.log(s["factor"]) + 1\n        cos, sin = angles.cos() * factor, angles.sin() * factor',
    ),
]
