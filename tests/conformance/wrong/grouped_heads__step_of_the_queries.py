"""The heads of k are stepped through as if there were as many as of q, so tokens of k mix if there are fewer."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""

    def rotated(x, heads):
        batch, seq, own, dim = x.shape
        flat = torch.nn.functional.pad(x.reshape(-1, dim), (0, 0, 0, batch * seq * max(heads - own, 0)))
        row = torch.arange(batch * seq)[:, None] * heads + torch.arange(own)
        picked = flat[row].view(batch, seq, own, dim)
        return turn(picked, cos[:, :, None], sin[:, :, None])

    return rotated(q, q.shape[2]), rotated(k, q.shape[2])


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("rotated(k, q.shape[2])", "rotated(k, k.shape[2])"),
]
