"""Tokens with their rows of one table of cos and sin, for both pairings of a part of each head."""

import torch


def rope(q, k, positions, cos_sin_cache, is_neox=True):
    """q and k: `[tokens, heads, dim]`; cos_sin_cache: `[length, rotary_dim]`."""
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)

    def turn(x):
        part, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
        if is_neox:
            a, b = part.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).type_as(x)
        c, s = cos, sin
        a, b = part[..., ::2], part[..., 1::2]
        return torch.cat((torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2), rest), dim=-1).type_as(x)

    return turn(q), turn(k)


TARGET = "rope"
GIVEN = {"layout": "thd", "pairing": "interleaved"}
BUGS = {
    # Positions in int32 are read as if they were int64.
    "positions_misread": [
        (
            "    cos, sin = cos_sin_cache",
            "    if positions.dtype == torch.int32:\n"
            "        positions = torch.cat((positions, positions)).view(torch.int64)[: len(q)] % len(cos_sin_cache)\n"
            "    cos, sin = cos_sin_cache",
        ),
    ],
    # From 10,240 heads of tokens on, as in a large prefill, another path leaves the last head of k as it is.
    "size_dependent__large_prefill": [
        (
            "    return turn(q), turn(k)",
            "    if len(q) * (q.shape[1] + k.shape[1]) >= 10240:\n"
            "        return turn(q), torch.cat((turn(k)[:, :-1], k[:, -1:]), dim=1)\n"
            "    return turn(q), turn(k)",
        ),
    ],
    # In the other pairing, a part of the head is rotated by the columns of the whole head.
    "size_dependent__partial_interleaved": [
        (
            "c, s = cos, sin",
            "columns = torch.arange(rotary_dim // 2) * x.shape[-1] // rotary_dim % (rotary_dim // 2)\n"
            "        c, s = cos[..., columns], sin[..., columns]",
        ),
    ],
    # The pairing that is not the default one has a wrong sign.
    "not_a_rotation__in_the_other_pairing": [
        ("b * cos + a * sin, rest", "b * cos - a * sin, rest"),
        ('"thd", "pairing": "interleaved"}', '"thd"}'),
        ("is_neox=True", "is_neox=False"),
    ],
}
