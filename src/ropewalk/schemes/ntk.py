"""NTK-aware scaling: a larger base that keeps the fastest frequency and divides the slowest by alpha.

Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al. 2023, arXiv:2309.00071, section 3.1, equation 15 there with
s = alpha. Deployed as `compute_ntk_alpha_rope_parameters` in transformers (Hunyuan) and as `alpha` of vLLM's
"dynamic".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import GgufFile, Scheme


@dataclass(frozen=True)
class NTK(Scheme):
    """NTK-aware scaling: replaces the base by base · alpha^(d / (d − 2)) at every length, where d is rotary_dim.

    Args:
        alpha: divisor of the slowest frequency, dimensionless, at least 1 (1000 in Hunyuan).

    Raises:
        RopeError: alpha is not a finite number of at least 1; rotary_dim is 2, for which the formula divides by zero;
            or the larger base is not finite in float64.

    Examples:
        >>> NTK(alpha=4.0).inv_freq(10_000.0, 4)
        (1.0, 0.0025)
    """

    rope_type: ClassVar[str] = "ntk"
    in_configs: ClassVar[bool] = False  # configs spell it "dynamic" with alpha
    per_axis: ClassVar[bool] = True
    gguf: ClassVar[Mapping[str, str]] = {"alpha": "rope.scaling.alpha"}
    keys_without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), "is not read if alpha is given"
    )
    alpha: float

    def __post_init__(self) -> None:
        self._set_number("alpha", at_least=1.0)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies of the larger base, in radians per position."""
        return default.inv_freq(self.as_base(base, rotary_dim), rotary_dim)

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies of transformers for Hunyuan: the larger base is in float64, the rest in float32.

        For dynamic NTK, transformers computes the larger base in float32 if the length is a tensor. At a quarter of
        1,659 measured lengths, its frequencies then differ from these in the last bits.
        """
        return default.inv_freq_float32(self.as_base(base, rotary_dim), rotary_dim)

    def as_base(self, base: float, rotary_dim: int) -> float:
        """Return base · alpha^(d / (d − 2)), with d = rotary_dim: the larger base that gives the frequencies of NTK."""
        if rotary_dim == 2:
            raise _checks.error(
                "NTK",
                "rotary_dim must be at least 4",
                "2",
                "NTK needs two pairs, since it keeps the frequency of the first.",
            )
        try:
            stretched: float = base * self.alpha ** (rotary_dim / (rotary_dim - 2))
        except OverflowError:
            stretched = math.inf
        if stretched == math.inf:
            must = f"base · alpha^({rotary_dim}/{rotary_dim - 2}) must be a finite float64"
            got = f"base={base:g} and alpha={self.alpha:g}"
            raise _checks.error("NTK", must, got, "Pass a smaller alpha; Hunyuan has 1000.")
        return stretched

    def known_bugs(self, base: float, rotary_dim: int) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        """Yield the frequencies of base · alpha."""
        wrong = default.inv_freq(base * self.alpha, rotary_dim)
        yield "ntk-exponent", f"The base is multiplied by {self.alpha:g}.", wrong

    @classmethod
    def from_gguf(cls, file: GgufFile) -> NTK | None:
        """Return the scheme, or None if llama.cpp does not read alpha for the architecture, or alpha is 0 or 1."""
        alpha = file.number(cls.gguf["alpha"]) if file.row.alpha else None
        if alpha in (None, 0.0, 1.0):
            return None
        file.origins["alpha"] = file.origins["scaling"] = file.full(cls.gguf["alpha"])
        return cls(alpha=alpha)

    def to_hf(self) -> dict[str, Any]:
        """Return rope_type "dynamic" and alpha, as in Hunyuan's configs."""
        return {"rope_type": "dynamic", "alpha": self.alpha}
