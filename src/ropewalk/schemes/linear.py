"""Position interpolation: divide every frequency by `factor`, so that every wavelength is `factor` times as long.

Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation",
arXiv:2306.15595, section 3.2. Deployed as `_compute_linear_scaling_rope_parameters` in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ropewalk.schemes import default
from ropewalk.schemes._scheme import GgufFile, Scheme


@dataclass(frozen=True)
class Linear(Scheme):
    """Position interpolation: divides every frequency by `factor`.

    Args:
        factor: target length / trained length, dimensionless, at least 1.

    Raises:
        RopeError: factor is not a finite number of at least 1.

    Examples:
        >>> Linear(factor=4.0).inv_freq(10_000.0, 4)
        (0.25, 0.0025)
    """

    rope_type: ClassVar[str] = "linear"
    per_axis: ClassVar[bool] = True
    gguf: ClassVar[Mapping[str, str]] = {"factor": "rope.scaling.factor"}
    factor: float

    def __post_init__(self) -> None:
        self._set_number("factor", at_least=1.0)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies divided by factor, in radians per position."""
        return tuple(w / self.factor for w in default.inv_freq(base, rotary_dim))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies of transformers: the default ones divided by factor, computed in float32."""
        return default.to_floats(1.0 / default.powers_float32(base, rotary_dim) / self.factor)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Linear | None:
        """Return the scheme, or None if the factor is missing, 0 or 1, for which llama.cpp does not scale."""
        factor = file.number(cls.gguf["factor"], at_least=0.0)
        if factor in (None, 0.0, 1.0):
            return None
        file.require(cls.gguf["factor"], factor, "")
        return cls(factor=factor)

    def trained_length(self, longest: int | None) -> None:
        """Return None: max_position_embeddings may be the length before or after scaling."""

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        if trained is not None:
            return []
        return [f"the file does not state the trained length: {named} may be the length before or after scaling."]
