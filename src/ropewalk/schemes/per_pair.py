"""Each pair slowed by a number of its own: what LongRoPE becomes at a length, and what GGUF's tensors of factors say.

Source: llama.cpp's `rope_freqs` and `rope_factors` tensors (`freq_factors` of `ggml_rope_ext`), which divide the angle.
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
class PerPair(Scheme):
    """inv_freq of pair i divided by factors[i].

    Args:
        factors: rotary_dim // 2 numbers greater than 0, dimensionless; infinite stops a pair.
        attention_factor: multiplier of cos and sin, dimensionless, greater than 0.

    Raises:
        RopeError: a value is outside its range, or there are not as many factors as pairs.

    Example:
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
        object.__setattr__(self, "factors", numbers("PerPair", "factors", self.factors, infinite=True))
        factor = _checks.number("PerPair", "attention_factor", self.attention_factor, above=0.0)
        object.__setattr__(self, "attention_factor", factor)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair: the default ones, each divided by its factor."""
        as_many_as_pairs("PerPair", "factors", self.factors, rotary_dim)
        return tuple(w / f for w, f in zip(default.inv_freq(base, rotary_dim), self.factors, strict=True))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """As `_compute_longrope_parameters` in transformers 5.23: power times factor in float32, and its inverse.

        llama.cpp divides the angle instead, and is not reproduced.
        """
        import torch

        as_many_as_pairs("PerPair", "factors", self.factors, rotary_dim)
        factors = torch.tensor(self.factors, dtype=torch.float32, device="cpu")
        return default.listed(1.0 / (factors * default.powers_float32(base, rotary_dim)))

    def table_factor(self) -> float:
        """What multiplies cos and sin, dimensionless."""
        return self.attention_factor

    def facts(self) -> dict[str, Any]:
        """As those of every scheme; the factor of a pair that stands still is null."""
        factors = [factor if math.isfinite(factor) else None for factor in self.factors]
        return {**super().facts(), "factors": factors}

    def trained_length(self, longest: int | None) -> None:
        """None: a length that a file states may be the one before or after."""

    def warnings(
        self, longest: int | None, *, named: str = "max_position_embeddings", trained: int | None = None
    ) -> list[str]:
        """That the trained length is not known."""
        if trained is not None:
            return []
        return [f"the file does not say on which length the model was trained: {named} may be before or after."]


# Far below any factor: a frequency divided by it is still finite.
_LEAST = 1e-300


def numbers(who: str, name: str, values: Any, *, infinite: bool = False) -> tuple[float, ...]:
    """A list of numbers greater than 0, as a tuple; bounded, so that no message and no memory grows with it."""
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= _checks.MAX_HEAD_DIM // 2:
        raise _checks.error(
            who, f"{name} must be a list of numbers, one for each pair", _checks.shown(values), "Pass a list."
        )
    return tuple(
        math.inf if infinite and isinstance(value, float) and value == math.inf else _factor(who, f"{name}[{i}]", value)
        for i, value in enumerate(values)
    )


def _factor(who: str, name: str, value: object) -> float:
    factor = _checks.number(who, name, value, above=0.0)
    if factor < _LEAST:
        must = f"{name} must be at least {_LEAST:g}, so that the frequency is finite"
        raise _checks.error(who, must, _checks.shown(value), "Is the list right? Real factors are about 1 to 100.")
    return factor


def as_many_as_pairs(who: str, name: str, values: tuple[float, ...], rotary_dim: int) -> None:
    """Raise unless there is one value for each pair."""
    if len(values) != rotary_dim // 2:
        raise _checks.error(
            who,
            f"{name} must have {rotary_dim // 2} numbers, one for each pair of rotary_dim={rotary_dim}",
            str(len(values)),
            "Is it the list of this model?",
        )
