"""The default frequencies: the geometric progression that every scheme starts from.

Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2: θ_i = 10000^(−2(i−1)/d), i from 1. Deployed as
`compute_default_rope_parameters` in transformers (`rope_type` "default").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["inv_freq"]
__dir__ = __all__.copy


def inv_freq(base: float, rotary_dim: int) -> tuple[float, ...]:
    """Return base^(−2i / rotary_dim) for i = 0 … rotary_dim/2 − 1.

    Args:
        base: 10000 in the paper, dimensionless, greater than 1. Configs call it `rope_theta`.
        rotary_dim: number of channels that rotate; even.

    Returns:
        rotary_dim // 2 float64 numbers in radians per position. The first is 1.0, the fastest.

    Examples:
        >>> inv_freq(10_000.0, 4)
        (1.0, 0.01)
    """
    return tuple(base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))


def inv_freq_float32(base: float, rotary_dim: int) -> tuple[float, ...]:
    """Return the frequencies as transformers and Meta's code compute them, with each operation in float32.

    Examples:
        >>> inv_freq_float32(10_000.0, 4)
        (1.0, 0.009999999776482582)
    """
    return to_floats(1.0 / powers_float32(base, rotary_dim))


def powers_float32(base: float, rotary_dim: int) -> Tensor:
    """Return base^(2i / rotary_dim) as a float32 CPU tensor of shape [rotary_dim // 2].

    Exponent and power are rounded to float32. The power is computed by PyTorch, because libraries round it
    differently. The last bit of a few values in a thousand depends on the instruction set (AVX-512, AVX2, or neither).
    """
    import torch

    even = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")
    powers: Tensor = base ** (even / rotary_dim)
    return powers


def to_floats(numbers: Tensor) -> tuple[float, ...]:
    """Return the values of a tensor as a tuple of floats. float32 values are represented exactly."""
    return tuple(numbers.tolist())
