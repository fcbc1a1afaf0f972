"""LongRoPE: divide the frequency of each pair by its own factor, with one list for short and one for long sequences.

Engines choose the list by different rules: by the length of the call, by the longest text in the batch, or by the
configured length. One engine always uses the long list. In ropewalk the caller decides once: `rope.at_length(n)` uses
the long list if n exceeds the trained length.

Source: Ding et al. 2024, arXiv:2402.13753, section 3; Phi-3's released code. Deployed as
`_compute_longrope_parameters` in transformers; short_mscale and long_mscale as in its models/phimoe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes._scheme import GgufFile, LengthDependent
from ropewalk.schemes.per_pair import PerPair, check_one_per_pair, positive_numbers


@dataclass(frozen=True)
class LongRoPE(LengthDependent):
    """LongRoPE: divides the frequencies by short_factor up to the trained length, and by long_factor beyond it.

    The attention factor applies in both cases. It is the first of these that is given: short_mscale or long_mscale,
    then `attention_factor`, else √(1 + ln factor / ln original_max_position_embeddings).

    Args:
        short_factor, long_factor: rotary_dim // 2 numbers greater than 0, dimensionless.
        original_max_position_embeddings: trained length, in tokens, at least 2.
        factor: target length / trained length, dimensionless, at least 1. Required to compute the attention factor.
        attention_factor: multiplier of cos and sin, dimensionless, greater than 0. None computes it from `factor`.
        short_mscale, long_mscale: the attention factor of each list (Phi-3.5-MoE), or None. Pass both or neither.

    Raises:
        RopeError: a value is outside its range; short_factor or long_factor has the wrong length; or factor,
            attention_factor and the mscales are all None.
    """

    rope_type: ClassVar[str] = "longrope"
    aliases: ClassVar[tuple[str, ...]] = ("su",)
    gguf: ClassVar[Mapping[str, str]] = {
        "short_factor": "rope_factors_short.weight",
        "long_factor": "rope_factors_long.weight",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "attention_factor": "rope.scaling.attn_factor",
    }
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, positive_numbers("LongRoPE", name, getattr(self, name)))
        self._set_length("original_max_position_embeddings", at_least=2)
        self._set_number("factor", optional=True, at_least=1.0)
        for name in ("attention_factor", "short_mscale", "long_mscale"):
            self._set_number(name, optional=True, above=0.0)
        if (self.short_mscale is None) != (self.long_mscale is None):
            raise _checks.error(
                "LongRoPE",
                "short_mscale and long_mscale must be given together",
                f"{self.short_mscale} and {self.long_mscale}",
                "Add the missing one or remove both.",
            )
        if self.factor is None and self.attention_factor is None and self.short_mscale is None:
            raise _checks.error(
                "LongRoPE",
                "factor, attention_factor or both mscales must be given",
                "none of them",
                "Add factor: it is max_position_embeddings / original_max_position_embeddings of the model.",
            )

    def check(self, rotary_dim: int) -> None:
        """Raise a RopeError unless both lists have one number for each pair."""
        check_one_per_pair("LongRoPE", "short_factor", self.short_factor, rotary_dim)
        check_one_per_pair("LongRoPE", "long_factor", self.long_factor, rotary_dim)

    def at_length(self, n: int) -> PerPair:
        """Return `PerPair` with long_factor if n exceeds original_max_position_embeddings, else with short_factor."""
        long = n > self.original_max_position_embeddings
        mscale = self.long_mscale if long else self.short_mscale
        return PerPair(
            factors=self.long_factor if long else self.short_factor,
            attention_factor=self._default_attention_factor() if mscale is None else mscale,
        )

    def _default_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor or 1.0) / math.log(self.original_max_position_embeddings))

    @classmethod
    def derived_fields(cls, stated: Mapping[str, Any], longest: int | None) -> dict[str, tuple[Any, str]]:
        """Return a missing factor: longest / original_max_position_embeddings, if this ratio is at least 1."""
        trained = stated.get("original_max_position_embeddings")
        if "factor" in stated or longest is None or not isinstance(trained, int) or not 0 < trained <= longest:
            return {}
        return {"factor": (longest / trained, "max_position_embeddings / original_max_position_embeddings")}

    @classmethod
    def from_gguf(cls, file: GgufFile) -> LongRoPE:
        """Return the scheme. llama.cpp computes no attention factor."""
        short, long, original, factor = (
            cls.gguf[name]
            for name in ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor")
        )
        trained = file.require(original, file.original, "The long factors apply beyond it. Convert the model again.")
        file.origins["short_factor"], file.origins["long_factor"] = short, long
        if file.get(factor) is None:
            without = "the file has no rope.scaling.attn_factor: llama.cpp uses 1, and other engines compute it."
            file.warnings.append(_checks.Assumed(without))
        return cls(
            short_factor=file.tensors[short],
            long_factor=file.tensors[long],
            original_max_position_embeddings=trained,
            attention_factor=file.attention_factor(),
        )

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        length = self.original_max_position_embeddings
        return [
            f"there are two sets of frequencies, and the long one applies beyond {length} tokens. "
            "Engines differ in when they switch. Call at_length(n)."
        ]
