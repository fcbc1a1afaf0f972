"""YaRN as in its paper and in Hugging Face's configs, with the attention factor in cos and sin."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def forward(self, q, k, position_ids):
        factor, length = self.scaling["factor"], self.scaling["original_max_position_embeddings"]
        plain = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        low, high = (
            self.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.base)) for turns in (32.0, 1.0)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.dim - 1)
        ramp = ((torch.arange(self.dim // 2) - low) / (high - low)).clamp(0, 1)
        inv_freq = plain * (1 - ramp) + plain / factor * ramp
        angles = position_ids[:, None, :, None] * inv_freq
        temperature = 0.1 * math.log(factor) + 1
        cos, sin = (angles.cos() * temperature).float(), (angles.sin() * temperature).float()

        def rotated(x):
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

        return rotated(q), rotated(k)


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
BUGS = {
    # The attention factor is missing.
    "attention_factor__missing": [("0.1 * math.log(factor) + 1", "1.0")],
    # The config states an attention factor, and that of the paper is used.
    "attention_factor__of_the_config_ignored": [('"factor": 8.0', '"factor": 8.0, "attention_factor": 1.0')],
    # The attention factor multiplies cos and sin, and then also the rotated channels.
    "attention_factor__twice": [("0.1 * math.log(factor) + 1", "(0.1 * math.log(factor) + 1) ** 2")],
    # The factor is computed from other lengths than those of the config, although the config states it.
    "wrong_frequencies__factor_from_the_lengths": [("plain / factor", "plain / 4.0")],
    # The ramp is computed from max_position_embeddings, the scaled length.
    "yarn_original_length": [("math.log(length /", "math.log(factor * length /")],
    # The fast pairs are slowed, and the slow ones left unchanged.
    "yarn_ramp_swapped": [("plain * (1 - ramp) + plain / factor * ramp", "plain * ramp + plain / factor * (1 - ramp)")],
    # beta_fast and beta_slow are swapped.
    "yarn_ramp_swapped__betas": [("(32.0, 1.0)", "(1.0, 32.0)")],
    # The config has truncate: false, but the ends of the ramp are rounded.
    "yarn_truncate": [('"factor": 8.0', '"factor": 8.0, "truncate": False')],
}
