"""SGLang's form: q and k in place, and k and v also to a cache with one row for each slot."""


def apply_rope_inplace_with_kvcache(q, k, v, k_cache, v_cache, cos_sin_cache, positions, out_loc, is_neox):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`; tokens whose out_loc is -1 are not stored."""
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        channels = x[..., :rotary_dim]
        first, second = (
            (channels[..., : rotary_dim // 2], channels[..., rotary_dim // 2 :])
            if is_neox
            else (channels[..., ::2], channels[..., 1::2])
        )
        a, b = first.float(), second.float()
        new = (a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)
        first.copy_(new[0])
        second.copy_(new[1])
    stored = (out_loc >= 0).nonzero().flatten()
    k_cache.index_copy_(0, out_loc[stored], k.detach()[stored])
    v_cache.index_copy_(0, out_loc[stored], v.detach()[stored])


TARGET = "apply_rope_inplace_with_kvcache"
GIVEN = {"pairing": "half"}
BUGS = {
    # SGLang 19636: the rotated key is written to the cache, but not back to k, which attention still reads.
    "key_not_rotated__sglang_19636": [
        ("    for x in (q, k):", "    k = k.clone()\n    for x in (q, k):"),
    ],
    # Position 0 gets the last row of the table.
    "positions_off_by_one__from_the_end_of_a_table": [("cos_sin_cache[positions]", "cos_sin_cache[positions - 1]")],
}
