"""Qwen2-VL in transformers: tables of three axes, and sections chosen where they are applied."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.base = config.rope_theta

    def forward(self, x, position_ids):
        """position_ids: `[3, batch, seq]`. Returns cos and sin `[3, batch, seq, head_dim]`."""
        inv_freq = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = position_ids[..., None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def choose(table, mrope_section, unsqueeze_dim):
    """Each section takes the table of its axis. table: `[3, batch, seq, head_dim]`."""
    parts = table.split(2 * list(mrope_section), dim=-1)
    return torch.cat([part[axis % 3] for axis, part in enumerate(parts)], dim=-1).unsqueeze(unsqueeze_dim)


def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    cos, sin = choose(cos, mrope_section, unsqueeze_dim), choose(sin, mrope_section, unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "Rotary,apply_multimodal_rotary_pos_emb"
GIVEN = {
    "config": {
        "model_type": "qwen2_vl",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
}
BUGS = {
    # The sections are doubled instead of repeated, so the two channels of a pair use different axes.
    "mixed_pairings__sections_doubled": [("2 * list(mrope_section)", "[2 * s for s in mrope_section]")],
    # The sections are in the order height, time, width.
    "sections_permuted__height_first": [("part[axis % 3]", "part[(1, 0, 2)[axis % 3]]")],
}
