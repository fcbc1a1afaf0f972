"""Loops over blocks of heads, tokens and pairs of sizes that divide nothing, each with a right mask."""

import torch


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""

    def rotated(x):
        _, seq, heads, dim = x.shape
        half, out = dim // 2, torch.empty_like(x)
        for token in range(0, seq, 48):
            for head in range(0, heads, 8):
                for pair in range(0, half, 32):
                    t, h = slice(token, min(token + 48, seq)), slice(head, min(head + 8, heads))
                    p, r = slice(pair, min(pair + 32, half)), slice(half + pair, half + min(pair + 32, half))
                    a, b = x[:, t, h, p], x[:, t, h, r]
                    c, s = cos[:, t, None, p], sin[:, t, None, p]
                    out[:, t, h, p] = a * c - b * s
                    out[:, t, h, r] = b * c + a * s
        return out

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
BUGS = {
    # A token between two blocks is in none of them.
    "output_not_written__between_blocks": [("range(0, seq, 48)", "range(0, seq, 49)")],
}
