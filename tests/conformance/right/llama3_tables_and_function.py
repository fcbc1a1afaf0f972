"""A class that computes the tables of Llama 3's scaling, and a function in Hugging Face's form."""

import math

import torch


class LlamaRotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, position_ids):
        s, dim = self.config.rope_scaling, self.config.head_dim
        plain = self.config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)
        smooth = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
        inv_freq = plain * smooth + plain / s["factor"] * (1 - smooth)
        angles = position_ids[..., None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "LlamaRotary,apply_rotary_pos_emb"
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
BUGS = {
    # The ramp is inverted.
    "llama3_smooth_inverted": [
        (
            "        inv_freq =",
            "        smooth = torch.where((smooth > 0) & (smooth < 1), 1 - smooth, smooth)\n        inv_freq =",
        ),
    ],
    # low_freq_factor and high_freq_factor are swapped.
    "llama3_smooth_inverted__factors_swapped": [
        ('turns - s["low_freq_factor"]', 'turns - s["high_freq_factor"]'),
        ('s["high_freq_factor"] - s["low_freq_factor"]', 's["low_freq_factor"] - s["high_freq_factor"]'),
    ],
    # The frequencies are not scaled.
    "scaling_ignored": [("None] * inv_freq", "None] * plain")],
    # The frequencies are scaled twice.
    "scaling_twice": [("None] * inv_freq", "None] * inv_freq * inv_freq / plain")],
    # Positions are divided by the frequencies.
    "wrong_exponent__divided": [("position_ids[..., None] * inv_freq", "position_ids[..., None] / inv_freq")],
}
