"""Each call rotates all keys, also those that earlier calls have rotated."""

import torch


def turn(x, positions):
    inv_freq = 10000.0 ** (-torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angles = (positions.float()[:, None] * inv_freq)[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)


def attend(q, k, v, past_k=None, past_v=None):
    """All: `[batch, seq, heads, dim]`."""
    past = 0 if past_k is None else past_k.shape[1]
    positions = past + torch.arange(q.shape[1])
    if past_k is not None:
        k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
    q, k = turn(q, positions), turn(k, torch.arange(k.shape[1]))
    return q, k, v


TARGET = "attend"
GIVEN = {"pairing": "half", "base": 10000.0, "layout": "bshd"}
REPAIR = [
    ("turn(k, torch.arange(k.shape[1]))", "torch.cat((k[:, :past], turn(k[:, past:], positions)), dim=1)"),
]
