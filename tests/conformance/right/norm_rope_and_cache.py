"""Norm, rotation and the write to the cache in one call, of which the cache is all that is kept of k and v."""

import torch

from ropewalk import Rope


def qk_norm_rope_cache(
    q, k, v, q_norm_weight, k_norm_weight, cos_sin_cache, positions, k_cache, v_cache, slots, eps=1e-6
):
    """q, k and v: `[tokens, heads, dim]`; caches: `[slots, heads, dim]`. Returns the rotated q and k."""
    half = cos_sin_cache.shape[-1] // 2
    rows = cos_sin_cache[positions].unsqueeze(-2)
    cos, sin = rows[..., :half], rows[..., half:]

    def finished(x, weight):
        y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)

    q, k = finished(q, q_norm_weight), finished(k, k_norm_weight)
    with torch.no_grad():
        kept = slots >= 0
        k_cache[slots[kept]] = k[kept]
        v_cache[slots[kept]] = v[kept]
    return q, k


TARGET = "qk_norm_rope_cache"
GIVEN = {
    "rope": Rope(128, 10000.0, "half", rotary_dim=64),
}
BUGS = {
    # The stored key is rotated but not normed.
    "stored_key_unlike_key__before_the_norm": [
        ("    q, k =", "    plain = finished(k, None)\n    q, k ="),
        ("y = torch.nn", "y = x.float() if weight is None else torch.nn"),
        ("= k[kept]", "= plain[kept]"),
    ],
    # All rows get the positions of the first. The norm and the slots are right.
    "first_row_positions__of_a_norm": [("cos_sin_cache[positions]", "cos_sin_cache[positions[:1]]")],
}
