"""SGLang 22868: only the rotated channels are copied to the cache, not the rest of the head."""

import torch

from ropewalk import Rope


def rope_neox_with_kv(q, k, v, cos_sin_cache, positions, key_cache, value_cache, slot_mapping):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns q and k."""
    rope_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def rotated(x):
        a, b = x[..., :rope_dim].float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rope_dim:].float()), dim=-1).type_as(x)

    q, k = rotated(q), rotated(k)
    kept = slot_mapping >= 0
    slots, width = slot_mapping[kept], rope_dim
    key_cache[slots, :, :width] = k[kept][..., :width].detach()
    value_cache[slots] = v[kept].detach()
    return q, k


TARGET = "rope_neox_with_kv"
GIVEN = {
    "rope": Rope(64, 10000.0, "half", rotary_dim=32),
}
REPAIR = [
    ("width = slot_mapping[kept], rope_dim", "width = slot_mapping[kept], k.shape[-1]"),
]
