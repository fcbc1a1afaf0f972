"""The key rope_scaling of the config is not read."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta

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
REPAIR = [
    (
        "self.base = config.head_dim, config.rope_theta",
        "self.base, self.s = config.head_dim, config.rope_theta, config.rope_scaling",
    ),
    (
        "        angles = ",
        """        low, high = self.s["low_freq_factor"], self.s["high_freq_factor"]
        length = self.s["original_max_position_embeddings"]
        smooth = ((length * inv_freq / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        inv_freq = inv_freq * smooth + inv_freq / self.s["factor"] * (1 - smooth)
        angles = """,
    ),
]
