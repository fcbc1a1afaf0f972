"""A larger base, chosen so that the pair which completes one turn in training completes one within the target length.

With L the trained length, the base is raised to the power ln(L · factor / 2π) / ln(L / 2π).

Source: `ScalingRotaryEmbedding` with the rope_type "theta_scale" in SGLang models/grok.py; the same class was in
vLLM at e443db5, layers/rotary_embedding/grok1_scaling_rope.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class ThetaScale(Scheme):
    """A larger base: the wavelength of the pair that turned once within the trained length grows by `factor`.

    Args:
        factor: target length / trained length, dimensionless, at least 1.
        original_max_position_embeddings: trained length L, in tokens, at least 7 (more than 2π).

    Raises:
        RopeError: a value is outside its range, or the larger base is not finite in float64.

    Examples:
        >>> round(ThetaScale(16.0, 8192).as_base(10_000.0, 128))
        351655
    """

    rope_type: ClassVar[str] = "theta_scale"
    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        self._set_number("factor", at_least=1.0)
        self._set_length("original_max_position_embeddings", at_least=7)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies of the larger base, in radians per position."""
        return default.inv_freq(self.as_base(base, rotary_dim), rotary_dim)

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies that SGLang computes: the larger base is in float64, the rest in float32."""
        return default.inv_freq_float32(self.as_base(base, rotary_dim), rotary_dim)

    def as_base(self, base: float, rotary_dim: int) -> float:
        """Return the larger base."""
        length = self.original_max_position_embeddings / (2 * math.pi)
        try:
            larger: float = base ** (math.log(length * self.factor) / math.log(length))
        except OverflowError:
            larger = math.inf
        if larger == math.inf:
            must, fix = "the larger base must be a finite float64", "Pass a smaller factor."
            raise _checks.error("ThetaScale", must, f"base={base:g} and factor={self.factor:g}", fix)
        return larger

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings
