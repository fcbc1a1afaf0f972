"""Linear scaling multiplies positions by the factor instead of dividing them."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta
        self.scaling = config.rope_scaling

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * self.scaling["factor"] * inv_freq
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
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
}
REPAIR = [
    ('* self.scaling["factor"] *', '/ self.scaling["factor"] *'),
]
