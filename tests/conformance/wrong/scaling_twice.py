"""The frequencies are scaled when the object is created, and again in forward."""

import torch


def scale(inv_freq, scaling):
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    smooth = ((length * inv_freq / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
    return smooth + (1 - smooth) / scaling["factor"]


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        plain = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        self.by = scale(plain, config.rope_scaling)
        self.inv_freq = plain * self.by

    def forward(self, x, positions):
        angles = positions[:, :, None, None].float() * self.inv_freq * self.by
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
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    }
}
REPAIR = [("self.inv_freq * self.by", "self.inv_freq")]
