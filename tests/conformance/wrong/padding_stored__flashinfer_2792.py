"""FlashInfer 2792: the fused cache update does not skip padding tokens, and writes them to the slot at the index -1."""

import torch


def rope_append_paged_kv_cache(q, k, v, cos_sin_cache, pos_ids, paged_k_cache, paged_v_cache, slot_mapping):
    """q, k and v: `[tokens, heads, dim]`; caches: `[blocks, block_size, heads, dim]`. Returns q and k."""
    cos, sin = cos_sin_cache[pos_ids][:, None].chunk(2, dim=-1)

    def rotated(x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    q, k = rotated(q), rotated(k)
    kept = slot_mapping >= -1
    slots = slot_mapping[kept] % (paged_k_cache.shape[0] * paged_k_cache.shape[1])
    block, index = slots // paged_k_cache.shape[1], slots % paged_k_cache.shape[1]
    paged_k_cache[block, index] = k[kept].detach()
    paged_v_cache[block, index] = v[kept].detach()
    return q, k


TARGET = "rope_append_paged_kv_cache"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("slot_mapping >= -1", "slot_mapping >= 0"),
]
