"""Dynamic NTK as in transformers 4.31: the base of the longest sequence so far is never reset."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.trained = config.head_dim, config.rope_theta, config.max_position_embeddings
        self.factor, self.longest = config.rope_scaling["factor"], 0

    def forward(self, x, positions):
        self.longest = max(self.longest, int(positions.max()) + 1)
        length = self.longest
        scale = self.factor * max(length, self.trained) / self.trained - (self.factor - 1)
        base = self.base * scale ** (self.dim / (self.dim - 2))
        inv_freq = base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
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
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    }
}
REPAIR = [
    ("length = self.longest", "length = int(positions.max()) + 1"),
]
