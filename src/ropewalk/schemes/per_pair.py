"""One divisor for each pair: LongRoPE at a known length, and the factor tensors of GGUF files.

Source: llama.cpp's `rope_freqs` and `rope_factors` tensors (`freq_factors` of `ggml_rope_ext`), which divide the angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import GgufFile, Scheme


@dataclass(frozen=True)
class PerPair(Scheme):
    """Scaling by one divisor for each pair: divides the frequency of pair i by factors[i].

    Args:
        factors: rotary_dim // 2 numbers greater than 0, dimensionless. A pair whose factor is infinite does not rotate.
        attention_factor: multiplier of cos and sin, dimensionless, greater than 0.

    Raises:
        RopeError: a value is outside its range, or the number of factors is not the number of pairs.

    Examples:
        >>> PerPair(factors=[1.0, 4.0]).inv_freq(10_000.0, 4)
        (1.0, 0.0025)
    """

    rope_type: ClassVar[str] = "per_pair"
    in_configs: ClassVar[bool] = False
    gguf: ClassVar[Mapping[str, str]] = {
        "factors": "rope_freqs.weight",
        "attention_factor": "rope.scaling.attn_factor",
    }
    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", positive_numbers("PerPair", "factors", self.factors, infinite=True))
        self._set_number("attention_factor", above=0.0)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies, each divided by its factor, in radians per position."""
        check_one_per_pair("PerPair", "factors", self.factors, rotary_dim)
        return tuple(w / f for w, f in zip(default.inv_freq(base, rotary_dim), self.factors, strict=True))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return 1 / (factor · base^(2i / rotary_dim)) in float32, as transformers does for LongRoPE.

        llama.cpp divides the angle instead. This method does not reproduce its rounding.
        """
        import torch

        check_one_per_pair("PerPair", "factors", self.factors, rotary_dim)
        factors = torch.tensor(self.factors, dtype=torch.float32, device="cpu")
        return default.to_floats(1.0 / (factors * default.powers_float32(base, rotary_dim)))

    def compute_attention_factor(self) -> float:
        return self.attention_factor

    @classmethod
    def from_gguf(cls, file: GgufFile) -> PerPair | None:
        """Return the scheme, or None if the file has no tensor of factors."""
        name = cls.gguf["factors"]
        if name not in file.tensors:
            return None
        file.origins["factors"] = file.origins["scaling"] = name
        return cls(factors=file.tensors[name], attention_factor=file.attention_factor())

    def facts(self) -> dict[str, Any]:
        """Return `rope_type` and every field. An infinite factor (no rotation) becomes None (null in JSON)."""
        factors = [factor if math.isfinite(factor) else None for factor in self.factors]
        return {**super().facts(), "factors": factors}

    def trained_length(self, longest: int | None) -> None:
        """Return None: the length that a file states may be the one before or after scaling."""

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        if trained is not None:
            return []
        return [f"the file does not state the trained length: {named} may be the length before or after scaling."]


# Far below any real factor, and large enough that a frequency divided by it is finite.
_LEAST = 1e-300


def positive_numbers(who: str, name: str, values: Any, *, infinite: bool = False) -> tuple[float, ...]:
    """Return a list of numbers greater than 0 as a tuple. Longer lists than any head needs are rejected.

    Args:
        who, name: for messages.
        values: the list or tuple.
        infinite: whether an infinite number is allowed.

    Raises:
        RopeError: `values` is not a list or tuple of such numbers, or is too long.
    """
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= _checks.MAX_HEAD_DIM // 2:
        raise _checks.error(
            who, f"{name} must be a list of numbers, one for each pair", _checks.shown(values), "Pass such a list."
        )
    return tuple(
        math.inf
        if infinite and isinstance(value, float) and value == math.inf
        else _check_factor(who, f"{name}[{i}]", value)
        for i, value in enumerate(values)
    )


def _check_factor(who: str, name: str, value: object) -> float:
    factor = _checks.number(who, name, value, above=0.0)
    if factor < _LEAST:
        must = f"{name} must be at least {_LEAST:g}, so that the frequency is finite"
        raise _checks.error(who, must, _checks.shown(value), "Check the list; real factors are about 1 to 100.")
    return factor


def check_one_per_pair(who: str, name: str, values: tuple[float, ...], rotary_dim: int) -> None:
    """Raise a RopeError unless there is one value for each pair."""
    if len(values) != rotary_dim // 2:
        raise _checks.error(
            who,
            f"{name} must have {rotary_dim // 2} numbers, one for each pair of rotary_dim={rotary_dim}",
            str(len(values)),
            "Pass the list of this model.",
        )
