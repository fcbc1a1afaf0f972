"""The first half is overwritten before the second is computed: `.float()` copies 16 bits, but not 32."""


def rotary_embedding(positions, query, key, head_size, cos_sin_cache):
    """query and key: `[tokens, heads · head_size]`, changed in place."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    for x in (query, key):
        first, second = x.unflatten(-1, (-1, 2, head_size // 2)).unbind(-2)
        a, b = first.detach().float(), second.detach().float()
        first.detach().copy_(a * cos - b * sin)
        second.detach().copy_(b * cos + a * sin)


TARGET = "rotary_embedding"
GIVEN = {
    "pairing": "half",
}
REPAIR = [
    ("first.detach().float(), second.detach().float()", "first.detach().clone(), second.detach().clone()"),
]
