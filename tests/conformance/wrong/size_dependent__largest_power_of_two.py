"""The number of pairs is rounded down to a power of two, so a head of 96 channels is rotated only in part."""


def rope(q, k, cos, sin):
    """q and k: `[batch, seq, heads, dim]`; cos and sin: `[batch, seq, dim / 2]`."""

    def rotated(x):
        half = cos.shape[-1]
        pairs = 1 << (half.bit_length() - 1)
        c, s = cos[:, :, None, :pairs], sin[:, :, None, :pairs]
        a, b = x[..., :pairs], x[..., half : half + pairs]
        out = x.clone()
        out[..., :pairs] = a * c - b * s
        out[..., half : half + pairs] = b * c + a * s
        return out

    return rotated(q), rotated(k)


TARGET = "rope"
GIVEN = {"pairing": "half"}
REPAIR = [
    ("1 << (half.bit_length() - 1)", "half"),
]
