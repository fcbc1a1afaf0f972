"""Dynamic NTK that recomputes the base in each call, from the longest row of the batch."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base, self.trained = config.head_dim, config.rope_theta, config.max_position_embeddings
        self.factor = config.rope_scaling["factor"]

    def forward(self, x, positions):
        length = max(int(positions.max()) + 1, self.trained)
        base = self.base * (self.factor * length / self.trained - (self.factor - 1)) ** (self.dim / (self.dim - 2))
        angles = positions[..., None, None] * base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


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
BUGS = {
    # As in transformers 4.31: the base of the longest sequence so far is never reset.
    "earlier_calls_matter__dynamic_ntk": [
        ('= config.rope_scaling["factor"]', '= config.rope_scaling["factor"]\n        self.longest = self.trained'),
        ("max(int(positions.max()) + 1, self.trained)", "self.longest = max(int(positions.max()) + 1, self.longest)"),
    ],
    # The base is computed once, for the longest sequence that the factor allows.
    "length_ignored__constant": [("max(int(positions.max()) + 1, self.trained)", "self.factor * self.trained")],
    # The length of the sequence is read from the axis of the heads.
    "length_ignored__from_the_heads": [
        (", positions)", ")"),
        ("int(positions.max()) + 1", "x.shape[1]"),
        ("positions[..., None, None]", "torch.arange(x.shape[2])[:, None]"),
        ('"factor": 4.0},\n    }', '"factor": 4.0},\n    },\n    "layout": "bhsd",'),
    ],
    # The exponents begin at 1 / dim, and the base depends on the length.
    "wrong_exponent__with_a_length": [("arange(0, self.dim, 2", "arange(1, self.dim, 2")],
}
