"""The code never reads its parameter for the positions, and counts from 0."""

import torch


def rotate(q, k, position_ids=None, base=10000.0):  # [batch, heads, seq, head_dim]
    inv_freq = base ** (-torch.arange(0, q.shape[-1], 2).float() / q.shape[-1])
    places = torch.arange(q.shape[2])[None]
    angles = places[:, None, :, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()

    def turn(x):
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "rotate"
GIVEN = {}
REPAIR = [("torch.arange(q.shape[2])[None]", "position_ids")]
