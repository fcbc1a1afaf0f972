"""A kernel that turns both ways: with conj, only the first of its outputs is turned back."""


def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    """x1 and x2: the halves of x `[batch, seq, heads, dim]`; cos and sin: `[seq, 1, dim / 2]`."""
    back = -sin if conj else sin
    out1.copy_(x1 * cos - x2 * back)
    out2.copy_(x2 * cos + x1 * sin)


TARGET = "apply_rotary"
GIVEN = {"ignore": ["no-gradient"]}
REPAIR = [
    ("x1 * sin", "x1 * back"),
]
