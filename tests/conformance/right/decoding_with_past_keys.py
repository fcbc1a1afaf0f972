"""Attention that keeps k and v: the rotated keys of earlier tokens come before the new ones."""

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
    q, k = turn(q, positions), turn(k, positions)
    if past_k is not None:
        k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
    return q, k, v


TARGET = "attend"
GIVEN = {"pairing": "half", "base": 10000.0, "layout": "bshd"}
BUGS = {
    # A prompt is right. Each later call counts its tokens from 0 again.
    "offset_ignored__after_past_keys": [("= past + torch", "= torch")],
    # A prompt and single tokens are right. Several new tokens all get the position of the last one.
    "one_position__of_several_new_tokens": [
        (
            "= past + torch.arange(q.shape[1])",
            "= past + torch.arange(q.shape[1]).clamp(min=q.shape[1] - 1 if past else 0)",
        ),
    ],
    # Each call rotates all keys, also those that earlier calls have rotated.
    "stored_key_unlike_key__past_rotated_again": [
        ("turn(q, positions), turn(k, positions)", "turn(q, positions), k"),
        ("return q, k, v", "return q, turn(k, torch.arange(k.shape[1])), v"),
    ],
    # All pairs but the first have a frequency of almost 0.
    "wrong_exponent__one_pair": [("float() / x.shape[-1])", "float() * x.shape[-1])")],
}
