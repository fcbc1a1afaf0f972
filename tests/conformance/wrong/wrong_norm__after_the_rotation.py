"""The heads are normed after they are rotated, so each weight meets another channel."""

import torch


def turn(x, cos, sin):
    """Rotate the first channels of x `[tokens, heads, dim]` by tables `[tokens, 1, rotary_dim / 2]`."""
    half = cos.shape[-1]
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def fused_qk_norm_rope(qkv, num_heads, num_kv_heads, head_size, q_weight, k_weight, eps, cos_sin_cache, positions):
    """qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_size]`. Returns q, k and v `[tokens, heads · head_size]`."""
    heads = qkv.unflatten(-1, (-1, head_size))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q = rms(turn(q, cos, sin), q_weight, eps)
    k = rms(turn(k, cos, sin), k_weight, eps)
    return q.flatten(1).type_as(qkv), k.flatten(1).type_as(qkv), v.flatten(1)


TARGET = "fused_qk_norm_rope"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("q = rms(turn(q, cos, sin), q_weight, eps)", "q = turn(rms(q, q_weight, eps), cos, sin)"),
    ("k = rms(turn(k, cos, sin), k_weight, eps)", "k = turn(rms(k, k_weight, eps), cos, sin)"),
]
