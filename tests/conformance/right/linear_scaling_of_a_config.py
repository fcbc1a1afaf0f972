"""Linear scaling, of which the config states the factor."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta
        self.scaling = config.rope_scaling

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() / self.scaling["factor"] * inv_freq
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
BUGS = {
    # Positions are multiplied by the factor instead of divided.
    "scaling_inverted": [("/ self.scaling", "* self.scaling")],
    # The base of the config, 500000, is not read, and 10000 is used instead.
    "wrong_base": [("config.rope_theta", 'getattr(config, "theta", 10000.0)')],
    # The config has the keys of transformers 5, and the code falls back to 10000 because it reads the older key.
    "wrong_base__key_of_transformers_4": [
        ("config.rope_theta", 'getattr(config, "rope_theta", None) or 10000.0'),
        ("config.rope_scaling", "config.rope_parameters"),
        ('        "rope_theta": 500000.0,\n', ""),
        ('"rope_scaling": {', '"rope_parameters": {"rope_theta": 500000.0, '),
    ],
    # The base is wrong, and the scaling is right.
    "wrong_base__with_a_scaling": [("self.base ** (", "(1.01 * self.base) ** (")],
}
