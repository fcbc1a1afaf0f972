"""NTK-aware scaling: a larger base, chosen so that the fastest pair keeps its speed and the slowest is slowed by alpha.

Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al. 2023, arXiv:2309.00071, section 3.1, equation 15 there with
s = alpha. Deployed as `compute_ntk_alpha_rope_parameters` in transformers 5.23 (Hunyuan) and as `alpha` of vLLM's
"dynamic".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class NTK(Scheme):
    """base · alpha^(d / (d − 2)), the same at every length.

    Args:
        alpha: how much the slowest pair is slowed, dimensionless, at least 1 (1000 in Hunyuan).

    Raises:
        RopeError: alpha is not a finite number of at least 1; rotary_dim is 2, where the formula divides by zero; the
            larger base is not finite in float64.

    Example:
        >>> NTK(alpha=4.0).inv_freq(10_000.0, 4)
        (1.0, 0.0025)
    """

    rope_type: ClassVar[str] = "ntk"
    in_configs: ClassVar[bool] = False  # there it is "dynamic" with alpha
    per_axis: ClassVar[bool] = True
    gguf: ClassVar[Mapping[str, str]] = {"alpha": "rope.scaling.alpha"}
    idle: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), "is not read where alpha is given"
    )
    alpha: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _checks.number("NTK", "alpha", self.alpha, at_least=1.0))

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair: the default ones of the larger base."""
        return default.inv_freq(self.as_base(base, rotary_dim), rotary_dim)

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """As transformers 5.23 for Hunyuan: the larger base in float64, the rest in float32.

        For dynamic NTK it makes the larger base in float32 where it is given the length as a tensor. At a quarter of
        the lengths (measured on 1,659) the frequencies there differ from these in the last bits.
        """
        return default.inv_freq_float32(self.as_base(base, rotary_dim), rotary_dim)

    def as_base(self, base: float, rotary_dim: int) -> float:
        """The larger base."""
        if rotary_dim == 2:
            raise _checks.error("NTK", "rotary_dim must be at least 4", "2", "One pair alone cannot be stretched.")
        try:
            stretched: float = base * self.alpha ** (rotary_dim / (rotary_dim - 2))
        except OverflowError:
            stretched = math.inf
        if stretched == math.inf:
            must = f"base · alpha^({rotary_dim}/{rotary_dim - 2}) must be a finite float64"
            got = f"base={base:g} and alpha={self.alpha:g}"
            raise _checks.error("NTK", must, got, "Is alpha right? Hunyuan has 1000.")
        return stretched

    def to_hf(self) -> dict[str, Any]:
        """ "dynamic" with alpha, as Hunyuan's configs say it."""
        return {"rope_type": "dynamic", "alpha": self.alpha}
