"""mojo_opset 253: the rows of cos and sin are stepped through by half a head, but they have rotary_dim / 2 columns."""

import torch


def rotary(q, k, cos, sin):
    """q and k: `[tokens, heads, head_dim]`; cos and sin: `[tokens, rotary_dim / 2]`."""
    tokens, head_dim, half = q.shape[0], q.shape[-1], cos.shape[-1]
    stride_token = head_dim // 2
    at = torch.arange(tokens)[:, None] * stride_token + torch.arange(half)
    c, s = (torch.nn.functional.pad(t.reshape(-1), (0, tokens * head_dim))[at][:, None] for t in (cos, sin))

    def rotated(x):
        a, b, rest = x.float().split((half, half, head_dim - 2 * half), dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1).type_as(x)

    return rotated(q), rotated(k)


TARGET = "rotary"
GIVEN = {"pairing": "half", "layout": "thd"}
REPAIR = [
    ("stride_token = head_dim // 2", "stride_token = half"),
]
