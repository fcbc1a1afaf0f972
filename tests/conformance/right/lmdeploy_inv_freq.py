"""lmdeploy: the function takes inv_freq and a factor that divides the positions."""

import torch


def fused_rotary_emb(query_states, key_states, position_ids, inv_freq, scaling_factor, out_q=None, out_k=None):
    """query_states and key_states: `[batch, seq, heads, dim]`; position_ids: `[batch, seq]`."""
    angles = (position_ids[..., None] / scaling_factor * inv_freq)[:, :, None]
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    return rotated(query_states), rotated(key_states)


TARGET = "fused_rotary_emb"
GIVEN = {"pairing": "half", "base": 500000.0}
