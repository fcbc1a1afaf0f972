"""The second half of q is computed from k, and the first half of k from q, as if a kernel mixed up two registers."""

import torch


def fused(q, k, cos, sin):
    """q and k: `[tokens, heads, dim]`, cos and sin: `[tokens, dim / 2]`."""
    cos, sin = cos[:, None], sin[:, None]
    (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
    group = q.shape[1] // k.shape[1]
    first_k, second_k = (x.repeat_interleave(group, dim=1) for x in (k1, k2))
    q_out = torch.cat((q1 * cos - q2 * sin, second_k * cos + first_k * sin), dim=-1)
    k_out = torch.cat((q1[:, ::group] * cos - q2[:, ::group] * sin, k2 * cos + k1 * sin), dim=-1)
    return q_out, k_out


TARGET = "fused"
GIVEN = {"layout": "thd"}
REPAIR = [
    ("second_k * cos + first_k * sin", "q2 * cos + q1 * sin"),
    ("q1[:, ::group] * cos - q2[:, ::group] * sin", "k1 * cos - k2 * sin"),
]
