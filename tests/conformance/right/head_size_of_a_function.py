"""A function that is told the size of a head, all of which it rotates."""

import torch


def rope(q, k, positions, head_size, base=1e6):
    inv_freq = base ** (-torch.arange(0, head_size, 2) / head_size)
    angles = (positions[:, None] * inv_freq)[:, None]

    def turn(x):
        a, b = x.float().chunk(2, dim=-1)
        rotated = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat(rotated, dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "rope"
_LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
GIVEN = {"config": {**_LLAMA, "rope_theta": 1e6}}
