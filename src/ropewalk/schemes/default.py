"""The geometric progression that every scheme starts from.

Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2: θ_i = 10000^(−2(i−1)/d), i from 1. Deployed as
`compute_default_rope_parameters` in transformers 5.23 (`rope_type` "default").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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


def inv_freq_float32(base: float, rotary_dim: int) -> tuple[float, ...]:
    """The same as transformers 5.23 and Meta's code make them: the exponent, the power and its inverse in float32.

    Example:
        >>> inv_freq_float32(10_000.0, 4)
        (1.0, 0.009999999776482582)
    """
    return listed(1.0 / powers_float32(base, rotary_dim))


def powers_float32(base: float, rotary_dim: int) -> Tensor:
    """base^(2i / rotary_dim), exponent and power rounded to float32: a float32 tensor of rotary_dim // 2 on the CPU.

    PyTorch raises to the power, since no two libraries round it alike. On a CPU without AVX2, neither does PyTorch: a
    few in a thousand then differ in the last bit.
    """
    import torch

    even = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")
    powers: Tensor = base ** (even / rotary_dim)
    return powers


def listed(numbers: Tensor) -> tuple[float, ...]:
    """The numbers of a tensor as a tuple; what is exactly float32 stays so."""
    return tuple(numbers.tolist())
