"""The kernel under flash-attention and the Hugging Face hub: two halves in, two outputs written, and a direction."""


def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    """x1, x2, out1 and out2: `[batch, seq, heads, dim / 2]`; cos and sin: `[seq or batch, seq, 1, dim / 2]`."""
    a, b = x1.float(), x2.float()
    s = -sin if conj else sin
    first, second = a * cos - b * s, b * cos + a * s
    out1.copy_(first)
    out2.copy_(second)


TARGET = "apply_rotary"
GIVEN = {"pairing": "half"}
