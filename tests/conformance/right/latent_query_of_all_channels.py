"""MLA's rotation of the last channels of a query, and of the part of the key that all heads share."""

import torch


class Rotary(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.sizes = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.inv_freq = config.rope_theta ** (-torch.arange(0, self.sizes[1], 2) / self.sizes[1])

    def forward(self, q, k_pe, positions):
        angles = (positions[..., None] * self.inv_freq)[:, :, None]
        nope, rope = q.split(self.sizes, dim=-1)
        return torch.cat((nope, turn(rope, angles)), dim=-1), turn(k_pe, angles)


def turn(x, angles):
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.stack(rotated, dim=-1).flatten(-2).type_as(x)


TARGET = "Rotary"
_SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "v_head_dim": 128}
_MODEL = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 2}
GIVEN = {"config": {**_MODEL, **_SIZES, "rope_theta": 10_000.0}}
BUGS = {
    "wrong_base__of_all_channels": [("= config.rope_theta **", "= (2 * config.rope_theta) **")],
}
