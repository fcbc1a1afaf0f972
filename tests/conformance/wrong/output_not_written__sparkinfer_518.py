"""sparkinfer 518: only the rotated channels of q are written, and the rest of the output keeps old values."""

import torch

from ropewalk import Rope


def qk_norm_rope(q, k, q_weight, k_weight, cos_sin_cache, positions, eps=1e-6):
    """q and k: `[tokens, heads, dim]`. Returns both with a norm for each head, then rotated."""
    rope_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def normed(x, weight):
        x32 = x.float()
        return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight

    def write(out, x, channels):
        a, b = x[..., :rope_dim].chunk(2, dim=-1)
        x = torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rope_dim:]), dim=-1)
        out[..., :channels] = x[..., :channels].type_as(out)
        return out

    q_out = write(torch.empty_like(q), normed(q, q_weight), rope_dim)
    k_out = write(torch.empty_like(k), normed(k, k_weight), k.shape[-1])
    return q_out, k_out


TARGET = "qk_norm_rope"
GIVEN = {"rope": Rope(64, 10000.0, "half", rotary_dim=16)}
REPAIR = [
    ("normed(q, q_weight), rope_dim)", "normed(q, q_weight), q.shape[-1])"),
]
