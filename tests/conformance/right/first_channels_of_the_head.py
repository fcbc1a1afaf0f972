"""GPT-NeoX: the first half of the channels of each head is rotated, with frequencies of its own size."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.dim, self.base = head_dim, head_dim // 2, base

    def forward(self, x, positions):
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = positions[:, :, None, None].float() * inv_freq
        x, rest = x[..., : self.dim], x[..., self.dim :]
        x1, x2 = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        x = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)
        return torch.cat((x, rest), dim=-1)


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
BUGS = {
    # The exponents are divided by the size of the whole head.
    "frequencies_over_head_dim": [("/ self.dim)", "/ self.head_dim)")],
    # The last channels are rotated.
    "wrong_slice": [("x, rest =", "rest, x ="), ("cat((x, rest)", "cat((rest, x)")],
    # The whole head is rotated.
    "wrong_slice__whole_head": [("head_dim // 2", "head_dim")],
    # The rotated channels are appended in place of the rest.
    "rest_not_passed__from_another_place": [("x[..., self.dim :]", "x[..., : self.dim]")],
    # One channel of each pair is only scaled.
    "not_a_rotation__one_product": [("x1 * cos - x2 * sin", "x1 * cos")],
}
