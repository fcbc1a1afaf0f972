"""Each frequency is computed from the previous one, and all in float32, as in ggml. The errors of all steps add up."""

import torch


def rotate(x, positions):
    step = torch.tensor(1000.0) ** torch.tensor(-2.0 / x.shape[-1])
    inv_freq = torch.ones(1)
    while len(inv_freq) < x.shape[-1] // 2:
        inv_freq = torch.cat((inv_freq, inv_freq[-1:] * step))
    angles = positions[..., None, None] * inv_freq
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)


TARGET = "rotate"
GIVEN = {"base": 1000.0, "head_dim": 256}
