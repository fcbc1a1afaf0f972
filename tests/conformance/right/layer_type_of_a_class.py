"""A class that is constructed for one kind of layer, whose rope it reads from the config."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config, layer_type):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_parameters[layer_type]["rope_theta"]

    def forward(self, x, positions):
        angles = positions[..., None, None] * self.base ** (-torch.arange(0, self.dim, 2).double() / self.dim)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


TARGET = "Rotary"
GIVEN = {
    "layer": 0,
    "config": {
        "model_type": "gemma3_text",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
}
