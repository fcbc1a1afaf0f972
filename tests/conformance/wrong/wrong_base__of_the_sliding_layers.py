"""The sliding layers of Gemma 3 have the base of the full ones. Its config states a pattern, and no kinds of layers."""

import torch


class Rotary:
    def __init__(self, config):
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.inv_freq = {
            "full_attention": config.rope_theta**-exponents,
            "sliding_attention": config.rope_theta**-exponents,
        }

    def forward(self, x, position_ids, layer_type):
        angles = position_ids[:, :, None, None] * self.inv_freq[layer_type]
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    __call__ = forward


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "layer": 0,
}
REPAIR = [
    ('"sliding_attention": config.rope_theta**', '"sliding_attention": config.rope_local_base_freq**'),
]
