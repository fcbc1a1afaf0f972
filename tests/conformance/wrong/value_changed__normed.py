"""The norm runs over all heads of qkv, and so over the values."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def norm_rope(qkv, num_heads, num_kv_heads, q_weight, k_weight, eps, cos, sin):
    """qkv: `[tokens, num_heads + 2 · num_kv_heads, dim]`; cos and sin: `[tokens, dim / 2]`. Changed in place."""
    cos, sin = cos[:, None], sin[:, None]
    q, k, v = qkv.detach().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q.copy_(turn(rms(q, q_weight, eps), cos, sin))
    k.copy_(turn(rms(k, k_weight, eps), cos, sin))
    v.copy_(rms(v, torch.ones_like(k_weight), eps))


TARGET = "norm_rope"
GIVEN = {
    "pairing": "half",
    "layout": "thd",
}
REPAIR = [
    ("    v.copy_(rms(v, torch.ones_like(k_weight), eps))", "    v.copy_(v)"),
]
