"""NeMo Automodel 2377: with the fused kernel the tables are those of the first tokens, whatever position_ids say."""

import torch


class LlamaRotaryEmbedding(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0, rope_fusion=True):
        super().__init__()
        self.head_dim, self.base, self.rope_fusion = head_dim, base, rope_fusion

    def forward(self, x, position_ids):
        needed = max(int(position_ids.max()) + 1, position_ids.shape[-1])
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = torch.outer(torch.arange(needed, dtype=torch.float64), self.base**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        at = torch.arange(position_ids.shape[-1]).expand_as(position_ids)
        angles = angles[at if self.rope_fusion else position_ids]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = "LlamaRotaryEmbedding,apply_rotary_pos_emb"
GIVEN = {"pairing": "half", "base": 10000.0}
REPAIR = [
    ("angles[at if self.rope_fusion else position_ids]", "angles[position_ids]"),
    ("        at = torch.arange(position_ids.shape[-1]).expand_as(position_ids)\n", ""),
]
