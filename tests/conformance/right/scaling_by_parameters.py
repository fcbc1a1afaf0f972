"""gpt-oss's own class, whose constructor takes the parameters of YaRN and no config."""

import math

import torch


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, head_dim, base, initial_context_length=4096, scaling_factor=1.0, ntk_alpha=1.0, ntk_beta=32.0):
        super().__init__()
        self.head_dim, self.base, self.length = head_dim, base, initial_context_length
        self.factor, self.alpha, self.beta = scaling_factor, ntk_alpha, ntk_beta

    def tables(self, count):
        half = self.head_dim // 2
        inv_freq = self.base ** (-torch.arange(half).float() / half)
        concentration = 1.0
        if self.factor > 1:
            concentration = 0.1 * math.log(self.factor) + 1
            low, high = (
                half * math.log(self.length / (turns * 2 * math.pi)) / math.log(self.base)
                for turns in (self.beta, self.alpha)
            )
            ramp = ((torch.arange(half).float() - low) / (high - low)).clamp(0, 1)
            inv_freq = inv_freq / self.factor * ramp + inv_freq * (1 - ramp)
        angles = torch.arange(count).float()[:, None, None] * inv_freq
        return angles.cos() * concentration, angles.sin() * concentration

    def forward(self, query, key):
        """query and key: `[tokens, heads · head_dim]`."""
        cos, sin = self.tables(len(query))

        def turn(x):
            a, b = x.float().view(len(x), -1, self.head_dim).chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x).view(x.shape)

        return turn(query), turn(key)


TARGET = "RotaryEmbedding"
GIVEN = {
    "config": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "head_dim": 64,
        "num_hidden_layers": 24,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
}
