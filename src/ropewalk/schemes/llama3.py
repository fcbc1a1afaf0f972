"""Llama 3.1 scaling: keep fast frequencies, divide slow ones by `factor`, and blend the two in between.

This is NTK-by-parts with α = low_freq_factor and β = high_freq_factor, without an attention factor.

Source: the Llama 3.1 release (`apply_scaling` in meta-llama/llama-models, models/llama3/model.py at a9c89c47). Deployed
as `_compute_llama3_parameters` in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme, reversed_ramp


@dataclass(frozen=True)
class Llama3(Scheme):
    """Llama 3.1 scaling: slows the pairs that complete fewer than `high_freq_factor` turns within the trained length.

    A pair completes original_max_position_embeddings / wavelength turns. With more than high_freq_factor turns, its
    inv_freq is kept. With fewer than low_freq_factor turns, it becomes inv_freq / factor. In between, the two are
    blended linearly in the number of turns.

    Args:
        factor: target length / trained length, dimensionless, at least 1 (8 in Llama 3.1, 32 in Llama 3.2).
        low_freq_factor: number of turns, greater than 0 (1 in Llama 3).
        high_freq_factor: number of turns, at least low_freq_factor (4 in Llama 3). If the two are equal, no pair is
            blended: Llama 4 Scout has 1 and 1.
        original_max_position_embeddings: trained length, in tokens (8192 in Llama 3).

    Raises:
        RopeError: a value is outside its range, or low_freq_factor is greater than high_freq_factor.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        self._set_number("factor", at_least=1.0)
        self._set_number("low_freq_factor", above=0.0)
        fix = "It must not be less than low_freq_factor. Check that the two are not swapped."
        self._set_number("high_freq_factor", at_least=self.low_freq_factor, fix=fix)
        self._set_length("original_max_position_embeddings")

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies in radians per position: kept, divided or blended, as the class describes."""
        return tuple(self._scale_frequency(w) for w in default.inv_freq(base, rotary_dim))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies as transformers and Meta's code compute them, in float32."""
        import torch

        length, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        kept = 1.0 / default.powers_float32(base, rotary_dim)
        wavelength = 2 * math.pi / kept
        slowed = torch.where(wavelength > length / low, kept / self.factor, kept)
        if low == high:
            return default.to_floats(slowed)
        smooth = (length / wavelength - low) / (high - low)
        blended = (1 - smooth) * kept / self.factor + smooth * kept
        between = (wavelength >= length / high) & (wavelength <= length / low)
        return default.to_floats(torch.where(between, blended, slowed))

    def _scale_frequency(self, w: float) -> float:
        turns = self.original_max_position_embeddings * w / (2 * math.pi)
        if turns > self.high_freq_factor:
            return w
        # "<=" avoids a division by zero where low == high.
        if turns <= self.low_freq_factor:
            return w / self.factor
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * w / self.factor + smooth * w

    def known_bugs(self, base: float, rotary_dim: int) -> Iterator[tuple[str, str, Sequence[float]]]:
        """Yield the frequencies of a mirrored ramp, of none, and those of a reversed one."""
        plain = default.inv_freq(base, rotary_dim)
        pairs = [(w, w / self.factor, f) for w, f in zip(plain, self.inv_freq(base, rotary_dim), strict=True)]
        between = [slowest * (1 + 1e-9) < f < w * (1 - 1e-9) for w, slowest, f in pairs]
        says = f"The {sum(between)} pairs on the ramp have the mirrored frequency."
        wrong = [w + slowest - f if on else f for (w, slowest, f), on in zip(pairs, between, strict=True)]
        yield "llama3-smooth-inverted", says, wrong
        for says, of in (("kept", 0), ("divided by the factor", 1)):
            wrong = [pair[of] if on else pair[2] for pair, on in zip(pairs, between, strict=True)]
            yield "wrong-frequencies", f"There is no ramp: the {sum(between)} pairs on it are {says}.", wrong
        yield from reversed_ramp("llama3-smooth-inverted", plain, self.factor)

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings
