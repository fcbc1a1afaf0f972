"""A module with `__call__` in place of `forward` multiplies the positions by the factor."""

import torch


class LinearScalingRope(torch.nn.Module):
    def __init__(self, dim, base=10000, linear_scale=2.0):
        super().__init__()
        self.dim, self.base, self.linear_scale = dim, base, linear_scale

    def __call__(self, x, offset=0):
        """x: `[batch, heads, seq, dim]`."""
        positions = torch.arange(offset, offset + x.shape[2]) * self.linear_scale
        angles = positions[:, None] * self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


TARGET = "LinearScalingRope"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "rope_theta": 100000,
    "max_position_embeddings": 16384,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}
GIVEN = {"config": CONFIG}
REPAIR = [(") * self.linear_scale", ") / self.linear_scale")]
