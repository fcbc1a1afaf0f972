"""Transformer Engine 536: after a prompt, every token of q gets the position of the last, and those of k get theirs."""

import torch


def turn(x, angles):
    angles = angles[:, None, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)


def rotate(q, k, offset: int):
    """All: `[seq, batch, heads, dim]`."""
    inv_freq = 10000.0 ** (-torch.arange(0, q.shape[-1], 2).float() / q.shape[-1])
    end = offset + len(k)
    angles = torch.arange(end).float()[:, None] * inv_freq
    of_q = angles if offset == 0 else angles[end - 1 : end]
    return turn(q, of_q), turn(k, angles[offset:end])


TARGET = "rotate"
GIVEN = {"pairing": "half", "base": 10000.0, "layout": "sbhd"}
REPAIR = [("of_q = angles if offset == 0 else angles[end - 1 : end]", "of_q = angles[offset:end]")]
