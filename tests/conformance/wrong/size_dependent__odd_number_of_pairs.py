"""Two pairs are rotated at a time, and with an odd number of pairs the last one is left as it is."""


def rope(x, cos, sin):
    """x: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, pairs]`. Pairs are interleaved."""
    out = x.clone()
    for pair in range(0, cos.shape[-1] - 1, 2):
        for i in (pair, pair + 1):
            if i < cos.shape[-1]:
                c, s = cos[:, :, None, i], sin[:, :, None, i]
                a, b = x[..., 2 * i], x[..., 2 * i + 1]
                out[..., 2 * i] = a * c - b * s
                out[..., 2 * i + 1] = b * c + a * s
    return out


TARGET = "rope"
GIVEN = {"pairing": "interleaved"}
REPAIR = [
    ("cos.shape[-1] - 1, 2)", "cos.shape[-1], 2)"),
]
