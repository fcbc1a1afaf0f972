"""A compiled script, and a class whose table `[seq, pairs, 2]` has no axis for rows and is cut along its first axis."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, max_seq_len):
        inv_freq = 10000.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.outer(torch.arange(max_seq_len), inv_freq)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)


@torch.jit.script
def apply_rotary_pos_emb(x: torch.Tensor, rope_cache: torch.Tensor) -> torch.Tensor:
    """x: `[batch, heads, seq, dim]`."""
    seq = x.size(2)
    table = rope_cache[:seq]
    cos, sin = table.view(-1, 1, seq, table.size(-2), 2).unbind(-1)
    a, b = x.float().reshape(x.size(0), x.size(1), seq, -1, 2).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(3).to(x.dtype)


TARGET = "Rotary,apply_rotary_pos_emb"
GIVEN = {"pairing": "interleaved", "base": 10000.0}
