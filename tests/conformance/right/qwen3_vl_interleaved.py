"""Qwen3-VL in transformers: one table, in which the frequencies of three axes are interleaved."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = config.head_dim, config.rope_theta
        self.sections = config.rope_scaling["mrope_section"]

    def forward(self, x, position_ids):
        """position_ids: `[3, batch, seq]`, or `[batch, seq]` for text. Returns cos and sin `[batch, seq, dim]`."""
        if position_ids.ndim == 2:
            position_ids = position_ids.expand(3, -1, -1)
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = position_ids[..., None] * inv_freq
        mixed = angles[0].clone()
        for axis in (1, 2):
            pairs = slice(axis, 3 * self.sections[axis], 3)
            mixed[..., pairs] = angles[axis, ..., pairs]
        mixed = torch.cat((mixed, mixed), dim=-1)
        return mixed.cos().to(x.dtype), mixed.sin().to(x.dtype)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(q), rotated(k)


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {
    "config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "rope_theta": 5000000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
    }
}
