"""Frequencies of half of the head are padded with zeros, so channel i rotates with i + 32 and not with i + 16."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, rotary_pct=0.5, base=10000.0):
        super().__init__()
        dim = int(head_dim * rotary_pct)
        self.width = head_dim
        inv_freq = base ** (-torch.arange(0, dim, 2).float() / dim)
        self.inv_freq = torch.nn.functional.pad(inv_freq, (0, (self.width - dim) // 2))

    def forward(self, x, positions):
        angles = positions[:, :, None, None].float() * self.inv_freq
        x1, x2 = x[..., : self.width].float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
        return torch.cat((rotated.type_as(x), x[..., self.width :]), dim=-1)


TARGET = "Rotary"
GIVEN = {
    "config": {
        "model_type": "gpt_neox",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_pct": 0.5,
        "rotary_emb_base": 10000,
    }
}
REPAIR = [("self.width = head_dim", "self.width = dim")]
