"""Dynamic NTK: no scaling up to the trained length, beyond it NTK-aware scaling that grows with the length.

The frequencies depend on the length of the sequence. Engines disagree on which length that is (of this call, of the
longest call so far, the longest that is configured), and keys already in a cache keep the rotation of an earlier
length. Here the caller says it once: `rope.at_length(n)`.

Source: emozilla, "Dynamically Scaled RoPE" (2023); Peng et al. 2023, arXiv:2309.00071, section 3.3. Deployed as
`_compute_dynamic_ntk_parameters` in transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes._scheme import LengthDependent, Scaling
from ropewalk.schemes.ntk import NTK


@dataclass(frozen=True)
class DynamicNTK(LengthDependent):
    """At length n beyond max_position_embeddings, NTK with alpha = factor · n / max_position_embeddings − (factor − 1).

    Args:
        factor: how fast alpha grows, dimensionless, at least 1. With 1, too, it is no scaling only up to
            max_position_embeddings: beyond, alpha is n / max_position_embeddings.
        max_position_embeddings: trained length, in tokens.

    Raises:
        RopeError: a value is outside its range.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _checks.number("DynamicNTK", "factor", self.factor, at_least=1.0))
        length = _checks.length("DynamicNTK", "max_position_embeddings", self.max_position_embeddings)
        object.__setattr__(self, "max_position_embeddings", length)

    def at_length(self, n: int) -> NTK | None:
        """None (the default frequencies) up to max_position_embeddings, else `NTK`.

        Raises:
            RopeError: alpha would not be finite.
        """
        if n <= self.max_position_embeddings:
            return None
        alpha = self.factor * n / self.max_position_embeddings - (self.factor - 1)
        if not math.isfinite(alpha):
            must = "factor times the length must be finite"
            raise _checks.error("DynamicNTK", must, f"factor={self.factor:g}", "Is the factor right?")
        return NTK(alpha=alpha)

    @classmethod
    def meant(cls, keys: Collection[str]) -> type[Scaling]:
        """`NTK` where the config gives alpha (Hunyuan), which holds at every length."""
        return NTK if "alpha" in keys else cls

    @classmethod
    def implied(cls, given: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
        """max_position_embeddings is that of the model."""
        name = "max_position_embeddings"
        return {} if longest is None or name in given else {name: (longest, name)}

    def to_hf(self) -> dict[str, Any]:
        """The factor; max_position_embeddings is that of the model."""
        return {"rope_type": self.rope_type, "factor": self.factor}

    def trained_length(self, longest: int | None) -> int:
        """max_position_embeddings."""
        return self.max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """That the frequencies depend on the length."""
        return [
            "the frequencies grow slower with the length: engines differ in which length they take; say at_length(n)."
        ]
