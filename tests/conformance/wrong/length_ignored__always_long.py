"""LongRoPE's long factors are always used, even for short sequences."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def forward(self, x, positions):
        factors = torch.tensor(self.scaling["long_factor"])
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim) / factors
        original = self.scaling["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(self.scaling["factor"]) / math.log(original))
        angles = positions[:, :, None, None].float() * inv_freq
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1 + i / 50 for i in range(32)],
            "long_factor": [1.0 + i for i in range(32)],
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
        },
    }
}
REPAIR = [
    (
        'factors = torch.tensor(self.scaling["long_factor"])',
        """long = int(positions.max()) >= self.scaling["original_max_position_embeddings"]
        factors = torch.tensor(self.scaling["long_factor" if long else "short_factor"])""",
    )
]
