"""Rows of tables for each token of each row of the batch."""

import torch


def turn(x, cos, sin):
    """Rotate x `[..., heads, dim]` by tables `[..., 1, dim / 2]`. Channel i and channel i + dim / 2 form a pair."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x):
        return turn(x, cos, sin)

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
BUGS = {
    # The heads of k are stepped through as if there were as many as of q, so tokens of k mix if there are fewer.
    "grouped_heads__step_of_the_queries": [
        (
            "        return turn",
            "        rows, heads = q.shape[0] * q.shape[1], q.shape[2]\n"
            "        flat = torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, rows * heads))\n"
            "        x = flat[torch.arange(rows)[:, None] * heads + torch.arange(x.shape[2])].view(x.shape)\n"
            "        return turn",
        ),
    ],
    # The path for a single token (decoding) takes the tables of the first row for the whole batch.
    "one_token_wrong__positions_of_the_first_row": [
        ("    cos, sin = cos[", "    if q.shape[1] == 1:\n        cos, sin = cos[:1], sin[:1]\n    cos, sin = cos["),
    ],
    # Two tokens are written at a time, and the last one of an odd number is never written.
    "output_not_written__odd_number_of_tokens": [
        # What memory held before may look right in another layout.
        ('GIVEN = {"pairing": "half"}', 'GIVEN = {"pairing": "half", "layout": "bshd"}'),
        (
            "return turn(x, cos, sin)",
            "out, end = torch.empty_like(x), x.shape[1] if x.shape[1] < 4 else x.shape[1] // 2 * 2\n"
            "        out[:, :end] = turn(x[:, :end], cos[:, :end], sin[:, :end])\n"
            "        return out",
        ),
    ],
    # The heads are rotated in blocks of eight. With more than eight heads, the rest of the last block is left out.
    "size_dependent__blocks_of_eight_heads": [
        (
            "return turn(x, cos, sin)",
            "end = 8 * max(x.shape[2] // 8, 1)\n"
            "        return torch.cat((turn(x[:, :, :end], cos, sin), x[:, :, end:]), dim=2)",
        ),
    ],
    # Tokens are rotated in blocks of 64, and what remains after the last full block is left as it is.
    "size_dependent__last_block_of_tokens": [
        (
            "return turn(x, cos, sin)",
            "end = x.shape[1] if x.shape[1] < 64 else x.shape[1] // 64 * 64\n"
            "        return torch.cat((turn(x[:, :end], cos[:, :end], sin[:, :end]), x[:, end:]), dim=1)",
        ),
    ],
    # The number of pairs is rounded down to a power of two, so a head of 96 channels is rotated only in part.
    "size_dependent__largest_power_of_two": [
        (
            "return turn(x, cos, sin)",
            "half, pairs = cos.shape[-1], 1 << (cos.shape[-1].bit_length() - 1)\n"
            "        out, at = x.clone(), [*range(pairs), *range(half, half + pairs)]\n"
            "        out[..., at] = turn(x[..., at], cos[..., :pairs], sin[..., :pairs])\n"
            "        return out",
        ),
    ],
}
