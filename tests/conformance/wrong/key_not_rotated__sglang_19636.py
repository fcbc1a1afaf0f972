"""SGLang 19636: the rotated key is written to the cache, but not back to k, which attention still reads."""

import torch


def apply_rope_inplace_with_kvcache(q, k, v, k_cache, v_cache, cos_sin_cache, positions, out_loc, is_neox):
    """q, k and v: `[tokens, heads, dim]`, q and k changed in place; caches: `[slots, heads, dim]`."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def rotated(x):
        if is_neox:
            a, b = x.float().chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
        a, b = x[..., ::2].float(), x[..., 1::2].float()
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)

    kept = out_loc >= 0
    rotated_k = rotated(k)
    k_cache[out_loc[kept]] = rotated_k[kept].detach()
    v_cache[out_loc[kept]] = v[kept].detach()
    q.copy_(rotated(q))


TARGET = "apply_rope_inplace_with_kvcache"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("    q.copy_(rotated(q))", "    q.copy_(rotated(q))\n    k.copy_(rotated_k)"),
]
