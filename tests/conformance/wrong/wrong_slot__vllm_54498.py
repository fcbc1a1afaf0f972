"""vLLM 54498: the position on the time axis is taken for the index of the token, which determines the slot.

An image has more tokens than steps of time, so its keys overwrite each other.
"""

import torch

from ropewalk import Axes, Rope


def mrope_and_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slots, mrope_section):
    """q, k and v: `[tokens, heads, dim]`; positions: `[3, tokens]`; caches: `[slots, heads, dim]`. Returns q and k."""
    cos, sin = (
        torch.cat([part[axis] for axis, part in enumerate(table.split(list(mrope_section), dim=-1))], dim=-1)[:, None]
        for table in cos_sin_cache[positions].chunk(2, dim=-1)
    )

    def rotated(x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)

    q, k = rotated(q), rotated(k)
    kept = slots >= 0
    at = positions[0][kept] % len(key_cache)
    key_cache[at], value_cache[at] = k[kept].detach(), v[kept].detach()
    return q, k


TARGET = "mrope_and_cache"
GIVEN = {
    "rope": Rope(64, 10000.0, "half", axes=Axes.sections((8, 12, 12))),
}
REPAIR = [
    ("positions[0][kept] % len(key_cache)", "slots[kept]"),
]
