"""Dynamic NTK: no scaling up to the trained length, and NTK-aware scaling that grows with the length beyond it.

The frequencies depend on the length of the sequence. Engines disagree on which length that is: the length
of this call, the length of the longest call so far, or the configured maximum. Keys already in a cache keep the
rotation of an earlier length. In ropewalk the caller fixes the length once, with `rope.at_length(n)`.

Source: emozilla, "Dynamically Scaled RoPE" (2023); Peng et al. 2023, arXiv:2309.00071, section 3.3. Deployed as
`_compute_dynamic_ntk_parameters` in transformers.
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
    """Dynamic NTK: no scaling up to max_position_embeddings, and `NTK` for longer sequences.

    For n tokens, alpha = factor · n / max_position_embeddings − (factor − 1).

    Args:
        factor: how fast alpha grows with the length n, dimensionless, at least 1. A factor of 1 still scales beyond
            max_position_embeddings, with alpha = n / max_position_embeddings.
        max_position_embeddings: trained length, in tokens.

    Raises:
        RopeError: a value is outside its range.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        self._set_number("factor", at_least=1.0)
        self._set_length("max_position_embeddings")

    def at_length(self, n: int) -> NTK | None:
        """Return `NTK` for lengths beyond max_position_embeddings, and None (the default frequencies) up to it.

        Raises:
            RopeError: alpha would not be finite.
        """
        if n <= self.max_position_embeddings:
            return None
        alpha = self.factor * n / self.max_position_embeddings - (self.factor - 1)
        if not math.isfinite(alpha):
            must = "factor times the length must be finite"
            raise _checks.error("DynamicNTK", must, f"factor={self.factor:g}", "Pass a smaller factor.")
        return NTK(alpha=alpha)

    @classmethod
    def class_for_keys(cls, keys: Collection[str]) -> type[Scaling]:
        """Return `NTK`, which does not depend on the length, if the config has the key alpha (Hunyuan)."""
        return NTK if "alpha" in keys else cls

    @classmethod
    def derived_fields(cls, stated: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
        """Return max_position_embeddings of the model's config if the parameters of the scheme omit it."""
        name = "max_position_embeddings"
        return {} if longest is None or name in stated else {name: (longest, name)}

    def to_hf(self) -> dict[str, Any]:
        """Return rope_type and factor. max_position_embeddings is a key of the config, not of `rope_parameters`."""
        return {"rope_type": self.rope_type, "factor": self.factor}

    def trained_length(self, longest: int | None) -> int:
        return self.max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        return [
            "the frequencies decrease as the length grows, and engines differ in which length they use. "
            "Call at_length(n)."
        ]
