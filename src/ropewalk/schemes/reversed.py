"""Rotation in the opposite direction: each pair rotates by minus its angle (nanochat and Talkie).

Source: transformers models/nanochat (`rotate_half` returns (x2, −x1)); mlx-lm models/talkie.py, which
negates the frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk.schemes._scheme import OnTop, Scheme


@dataclass(frozen=True)
class Reversed(OnTop):
    """The opposite direction: negates the frequencies of another scheme.

    Args:
        scaling: that scheme. None means the default frequencies.

    Raises:
        RopeError: `scaling` depends on the length, or is not a scheme.

    Examples:
        >>> Reversed().inv_freq(10_000.0, 4)
        (-1.0, -0.01)
    """

    rope_type: ClassVar[str] = "reversed"
    in_configs: ClassVar[bool] = False
    scaling: Scheme | None = None

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the negated frequencies, in radians per position."""
        return tuple(-w for w in self.before.inv_freq(base, rotary_dim))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the negated float32 frequencies. Deployed code that negates the sine gets the same cos and sin."""
        return tuple(-w for w in self.before.inv_freq_float32(base, rotary_dim))

    def to_hf(self) -> dict[str, Any]:
        """Return the parameters of `scaling`, since the model_type implies the direction."""
        return {"rope_type": "default"} if self.scaling is None else self.scaling.to_hf()
