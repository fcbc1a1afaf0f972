"""As in multi-head latent attention: k has no axis for heads, and broadcasting accepts other layouts of few tokens."""

import torch


def apply_rope_pe(q_pe, k_pe, cos, sin):
    """q_pe: `[tokens, heads, dim]`, k_pe: `[tokens, dim]`; cos and sin: `[tokens, dim]`."""
    half = q_pe.shape[-1] // 2

    def rotated(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    q = rotated(q_pe, cos[:, None, :half], sin[:, None, :half])
    return q, rotated(k_pe, cos[:, :half], sin[:, :half])


TARGET = "apply_rope_pe"
GIVEN = {}
