"""YaRN in logarithms: the ramp of YaRN, which blends the logarithms of kept and divided frequencies (Grok).

Source: `ScalingRotaryEmbedding` with the rope_type "yarn_log" in SGLang models/grok.py; the same class was in
vLLM at e443db5, layers/rotary_embedding/grok1_scaling_rope.py. It computes YaRN's attention factor and does not use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme
from ropewalk.schemes.yarn import YaRN


@dataclass(frozen=True)
class YarnLog(Scheme):
    """YaRN in logarithms: divides the frequency of a pair by factor^s, where s grows from 0 to 1 on YaRN's ramp.

    Args:
        factor, original_max_position_embeddings, beta_fast, beta_slow: as in `YaRN`.

    Raises:
        RopeError: as in `YaRN`.

    Examples:
        >>> YarnLog(16.0, 8192, beta_fast=8.0).inv_freq(10_000.0, 8)
        (1.0, 0.1, 0.01, 0.00025)
    """

    rope_type: ClassVar[str] = "yarn_log"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        yarn = self._yarn()
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            object.__setattr__(self, name, getattr(yarn, name))

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies, each divided by its power of factor, in radians per position."""
        low, high = self._ramp(base, rotary_dim)
        slowed = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rotary_dim // 2))
        return tuple(w / self.factor**s for w, s in zip(default.inv_freq(base, rotary_dim), slowed, strict=True))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the frequencies that SGLang computes. The ends of the ramp are in float64, the rest float32.

        The last bit of a float32 log depends on the processor, and with it a frequency f by about |ln f| · 2⁻²³ of f.
        """
        import torch

        low, high = self._ramp(base, rotary_dim)
        powers = default.powers_float32(base, rotary_dim)
        index = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((index - low) / (high - low)).clamp(0, 1)
        logs = (1.0 / powers).log() * kept + (1.0 / (self.factor * powers)).log() * (1.0 - kept)
        return default.to_floats(logs.exp())

    def trained_length(self, longest: int | None) -> int:
        return self.original_max_position_embeddings

    def _yarn(self) -> YaRN:
        """Return YaRN with the same ramp."""
        return YaRN(self.factor, self.original_max_position_embeddings, self.beta_fast, self.beta_slow)

    def _ramp(self, base: float, rotary_dim: int) -> tuple[float, float]:
        """Return the ends of the ramp. If it has no width, Grok's code moves the lower end, and YaRN's the upper."""
        low, high = self._yarn().ramp(base, rotary_dim)
        return (low - 0.001, low) if high == low + 0.001 else (low, high)
