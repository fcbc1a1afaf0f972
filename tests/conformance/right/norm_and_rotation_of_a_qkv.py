"""A fused qkv in, and q, k and v out: each head of q and k is normed, and its first channels are rotated."""

import torch

from ropewalk import Rope


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
    q = turn(rms(q, q_weight, eps), cos, sin)
    k = turn(rms(k, k_weight, eps), cos, sin)
    return q.flatten(1).type_as(qkv), k.flatten(1).type_as(qkv), v.flatten(1)


TARGET = "fused_qk_norm_rope"
GIVEN = {"rope": Rope(64, 10000.0, "half", rotary_dim=32)}
BUGS = {
    # The heads are normed after they are rotated, so each weight meets another channel.
    "wrong_norm__after_the_rotation": [
        ("turn(rms(q, q_weight, eps), cos, sin)", "rms(turn(q, cos, sin), q_weight, eps)"),
        ("turn(rms(k, k_weight, eps), cos, sin)", "rms(turn(k, cos, sin), k_weight, eps)"),
    ],
    # The keys are rotated without being normed.
    "wrong_norm__only_queries": [("rms(k, k_weight, eps)", "k")],
    # The mean of the squares is taken over the rotated channels only.
    "wrong_norm__only_rotated_channels": [("x.square()", "x[..., :32].square()")],
    # The mean of the squares is taken over all heads of a token instead of one.
    "wrong_norm__over_all_heads": [("mean(dim=-1", "mean(dim=(-2, -1)")],
    # The keys are normed with the weight of the queries.
    "wrong_norm__weight_of_the_queries": [("rms(k, k_weight", "rms(k, q_weight")],
    # The norm is right. The sines of q are not.
    "not_a_rotation__after_a_norm": [
        ("q = turn(rms(q, q_weight, eps), cos, sin)", "q = turn(rms(q, q_weight, eps), cos, cos)")
    ],
}
