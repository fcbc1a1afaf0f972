"""The mean of the squares is taken over the rotated channels only."""

import torch

from ropewalk import Rope


def turn(x, cos, sin):
    """Rotate the first channels of x `[tokens, heads, dim]` by tables `[tokens, 1, rotary_dim / 2]`."""
    half = cos.shape[-1]
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)


def fused_qk_norm_rope(qkv, num_heads, num_kv_heads, head_size, q_weight, k_weight, eps, cos_sin_cache, positions):
    """qkv: `[tokens, (num_heads + 2 · num_kv_heads) · head_size]`. Returns q, k and v `[tokens, heads · head_size]`."""
    heads = qkv.unflatten(-1, (-1, head_size))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    width = cos_sin_cache.shape[-1]
    q_scale = torch.rsqrt(q[..., :width].float().square().mean(-1, keepdim=True) + eps)
    k_scale = torch.rsqrt(k[..., :width].float().square().mean(-1, keepdim=True) + eps)
    q, k = turn(q * q_scale * q_weight, cos, sin), turn(k * k_scale * k_weight, cos, sin)
    return q.flatten(1).type_as(qkv), k.flatten(1).type_as(qkv), v.flatten(1)


TARGET = "fused_qk_norm_rope"
GIVEN = {
    "rope": Rope(64, 10000.0, "half", rotary_dim=32),
}
REPAIR = [
    ("width = cos_sin_cache.shape[-1]", "width = head_size"),
]
