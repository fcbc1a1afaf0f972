"""A loop over the pairs of one vector, as learners write it. The exponents are twice as large as they should be."""

import math


def rotate(x, m, base=10000.0):
    """x: `[d]`, at position m."""
    d, out = len(x), x.clone()
    for i in range(0, d, 2):
        angle = m * base ** (-2 * i / d)
        out[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        out[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
    return out


TARGET = "rotate"
GIVEN = {"base": 10_000.0, "head_dim": 16}
REPAIR = [("-2 * i / d", "-i / d")]
