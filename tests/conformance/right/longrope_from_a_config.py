"""LongRoPE as in Phi 3: two lists of factors, of which the length of the longest row selects one."""

import math

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.scaling = config.head_dim, config.rope_theta, config.rope_scaling

    def forward(self, x, positions):
        original = self.scaling["original_max_position_embeddings"]
        long = int(positions.max()) >= original
        factors = torch.tensor(self.scaling["long_factor" if long else "short_factor"])
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim) / factors
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
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1 + i / 50 for i in range(32)],
            "long_factor": [1.0 + i for i in range(32)],
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
        },
    }
}
BUGS = {
    # The list of factors is chosen by the length, but the attention factor is not applied.
    "attention_factor__missing_from_longrope": [
        ("angles.cos() * factor, angles.sin() * factor", "angles.cos(), angles.sin()")
    ],
    # The attention factor is applied to short sequences only.
    "attention_factor__only_for_short_sequences": [("factor = math", "factor = 1.0 if long else math")],
    # The long factors are never used, even for long sequences.
    "length_ignored": [('"long_factor" if long else "short_factor"', '"short_factor"')],
    # The long factors are always used, even for short sequences.
    "length_ignored__always_long": [('"long_factor" if long else "short_factor"', '"long_factor"')],
    # The lists of factors are swapped. One list of 1, and one of a number, are a plain and a linear scaling.
    "lengths_exchanged": [
        ('"long_factor" if long else "short_factor"', '"short_factor" if long else "long_factor"'),
        ("[1 + i / 50 for i in range(32)]", "[1.0] * 32"),
        ("[1.0 + i for i in range(32)]", "[8.0] * 32"),
    ],
    # They are swapped from the last position of a short sequence on.
    "lengths_exchanged__one_earlier": [
        ('"long_factor" if long else "short_factor"', '"short_factor" if long else "long_factor"'),
        ("int(positions.max()) >=", "int(positions.max()) + 1 >="),
    ],
    # The factors are chosen by the position of each token instead of the length of the sequence.
    "length_ignored__per_token": [
        ("int(positions.max()) >=", "positions[:, :, None, None] >="),
        ('self.scaling["long_factor" if long else "short_factor"]', 'self.scaling["long_factor"]'),
        ("/ factors", '/ torch.where(long, factors, torch.tensor(self.scaling["short_factor"]))'),
        ("[1 + i / 50 for i in range(32)]", "[1.0] * 32"),
        ("[1.0 + i for i in range(32)]", "[8.0] * 32"),
    ],
    # Positions are rounded, and the length is not.
    "low_precision_positions__of_a_long_sequence": [
        ("positions[:, :, None, None].float()", "positions[:, :, None, None].bfloat16()")
    ],
}
