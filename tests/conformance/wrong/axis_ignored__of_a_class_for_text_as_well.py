"""M-RoPE of a class that takes positions with and without axes, and rotates all pairs by the time, as it does text."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(config.rope_scaling["mrope_section"]))

    def forward(self, x, position_ids):
        """position_ids: `[3, batch, seq]` or `[batch, seq]`."""
        if position_ids.ndim == 2:
            position_ids = position_ids.expand(3, -1, -1)
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = position_ids[0 * self.axis].movedim(0, -1) * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {
    "config": {
        "model_type": "qwen2_vl",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
}
REPAIR = [("0 * self.axis", "self.axis")]
