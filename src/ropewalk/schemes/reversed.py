"""Rotation in the opposite direction: each pair rotates by minus its angle (nanochat and Talkie).

Source: transformers 5.23 models/nanochat (`rotate_half` returns (x2, −x1)); mlx-lm 0.32.2 models/talkie.py, which
negates the frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class Reversed(Scheme):
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

    def __post_init__(self) -> None:
        if self.scaling is not None and not isinstance(self.scaling, Scheme):
            must = "scaling must be a scheme that is the same at every length, or None"
            raise _checks.error("Reversed", must, _checks.shown(self.scaling), "Pass e.g. YaRN(...).")

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the negated frequencies, in radians per position."""
        return tuple(-w for w in (default if self.scaling is None else self.scaling).inv_freq(base, rotary_dim))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the negated float32 frequencies. Deployed code that negates the sine gets the same cos and sin."""
        return tuple(-w for w in (default if self.scaling is None else self.scaling).inv_freq_float32(base, rotary_dim))

    def compute_attention_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.compute_attention_factor()

    def trained_length(self, longest: int | None) -> int | None:
        return longest if self.scaling is None else self.scaling.trained_length(longest)

    def to_hf(self) -> dict[str, Any]:
        """Return the parameters of `scaling`, since the model_type implies the direction."""
        return {"rope_type": "default"} if self.scaling is None else self.scaling.to_hf()

    def facts(self) -> dict[str, Any]:
        inner = {} if self.scaling is None else self.scaling.facts()
        return {"rope_type": self.rope_type, "on": inner.pop("rope_type", "default"), **inner}
