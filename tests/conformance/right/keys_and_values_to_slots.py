"""Rotation and the write to a cache of slots in one call."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_and_store(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    kept = slots >= 0
    key_cache[slots[kept]] = k[kept].detach()
    value_cache[slots[kept]] = v[kept].detach()
    return q, k


TARGET = "rope_and_store"
GIVEN = {"pairing": "half"}
BUGS = {
    # The path for a single token returns before the cache is written.
    "cache_not_written__single_token": [("    kept =", "    if len(q) == 1:\n        return q, k\n    kept =")],
    # Slots of -1 are clamped to 0 to keep the index valid, so padding tokens overwrite the first slot.
    "padding_stored__in_slot_zero": [("    kept =", "    slots = slots.clamp(min=0)\n    kept =")],
    # Padding tokens are skipped where keys are stored, but not where values are.
    "padding_stored__only_values": [("value_cache[slots[kept]] = v[kept]", "value_cache[slots] = v")],
    # The key is stored before it is rotated.
    "stored_key_unlike_key__not_rotated": [
        ("    q, k = turn(q, cos, sin), turn(k, cos, sin)\n", ""),
        ("return q, k", "return turn(q, cos, sin), turn(k, cos, sin)"),
    ],
    # k is rotated in place, and the function that stores it rotates it again.
    "stored_key_unlike_key__rotated_twice": [
        ("q, k = turn(q, cos, sin), turn(k, cos, sin)", "q.copy_(turn(q, cos, sin))\n    k.copy_(turn(k, cos, sin))"),
        ("= k[kept]", "= turn(k, cos, sin)[kept]"),
        ("    return q, k\n", ""),
    ],
    # Keys and values are stored at the position of the token, which is its slot only in a cache for one sequence.
    "wrong_slot__stored_at_the_position": [
        ("key_cache[slots[kept]]", "at = positions[kept] % len(key_cache)\n    key_cache[at]"),
        ("value_cache[slots[kept]]", "value_cache[at]"),
    ],
    # The keys go to their slots, but the values are written to the first slots in the order of the tokens.
    "wrong_slot__values_in_the_order_of_tokens": [("value_cache[slots[kept]]", "value_cache[kept.nonzero()[:, 0]]")],
    # Nothing is rotated before it is stored.
    "not_rotated__and_stored": [("    q, k = turn(q, cos, sin), turn(k, cos, sin)\n", "")],
    # Positions begin again at 32.
    "table_wraps__early": [("cos_sin_cache[positions]", "cos_sin_cache[positions % 32]")],
}
