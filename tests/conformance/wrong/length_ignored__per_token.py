"""LongRoPE's factors are chosen by the position of each token instead of the length of the sequence."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def forward(self, x, positions):
        original = self.scaling["original_max_position_embeddings"]
        long = positions[:, :, None, None] >= original
        short, long_factors = (torch.tensor(self.scaling[f"{which}_factor"]) for which in ("short", "long"))
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        inv_freq = inv_freq / torch.where(long, long_factors, short)
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
        "max_position_embeddings": 16384,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 32,
            "long_factor": [4.0] * 32,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    }
}
REPAIR = [
    ("positions[:, :, None, None] >= original", "positions.max() >= original"),
]
