"""The geometric progression that every scheme starts from.

Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2: θ_i = 10000^(−2(i−1)/d), i from 1. Deployed as
`compute_default_rope_parameters` in transformers 5.23 (`rope_type` "default").
"""

from __future__ import annotations


def inv_freq(base: float, rotary_dim: int) -> tuple[float, ...]:
    """base^(−2i / rotary_dim) for i = 0 … rotary_dim/2 − 1.

    Args:
        base: the 10000 of the paper, dimensionless, greater than 1. Called `rope_theta` in configs.
        rotary_dim: channels that turn, even.

    Returns:
        rotary_dim // 2 float64 numbers in radians per position; the first is 1.0, the fastest.

    Example:
        >>> inv_freq(10_000.0, 4)
        (1.0, 0.01)
    """
    return tuple(base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
