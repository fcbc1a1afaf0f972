"""The stored key is rotated but not normed."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rms(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def norm_rope_and_store(
    q, k, v, q_weight, k_weight, eps, positions, cos_sin_cache, key_cache, value_cache, slot_mapping
):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    plain = turn(k, cos, sin)
    q = turn(rms(q, q_weight, eps), cos, sin).type_as(q)
    k = turn(rms(k, k_weight, eps), cos, sin).type_as(k)
    kept = slot_mapping >= 0
    key_cache[slot_mapping[kept]] = plain[kept].detach()
    value_cache[slot_mapping[kept]] = v[kept].detach()
    return q, k


TARGET = "norm_rope_and_store"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("    plain = turn(k, cos, sin)\n", ""),
    ("plain[kept].detach()", "k[kept].detach()"),
]
