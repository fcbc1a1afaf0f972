"""Proportional RoPE (p-RoPE): the fastest pairs rotate as in a whole head, and the others do not rotate.

This is not partial rotation. The exponent and the pairs are those of the whole head (channel i pairs with
i + head_dim/2). Partial rotation of the same number of pairs has other frequencies, and rotates other channels.

Source: Barbero et al. 2024, "Round and Round We Go!", arXiv:2410.06205, section 6.1. Deployed as
`_compute_proportional_rope_parameters` in transformers (Gemma 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class Proportional(Scheme):
    """Proportional RoPE: rotates only the first pairs, as in a whole head, at inv_freq / factor.

    The number of these pairs is int(partial_rotary_factor · rotary_dim // 2).
    `Rope.rotary_dim` must be the whole head (`Rope.head_dim`).

    Args:
        partial_rotary_factor: share of the pairs that rotate, dimensionless, greater than 0 and at most 1.
        factor: divisor of their frequencies, dimensionless, at least 1.

    Raises:
        RopeError: a value is outside its range, or no pair rotates.

    Examples:
        >>> Proportional(partial_rotary_factor=0.5).inv_freq(10_000.0, 8)
        (1.0, 0.1, 0.0, 0.0)
    """

    rope_type: ClassVar[str] = "proportional"
    whole_head: ClassVar[bool] = True
    partial_rotary_factor: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        share = _checks.number("Proportional", "partial_rotary_factor", self.partial_rotary_factor, above=0.0)
        if share > 1.0:
            raise _checks.error(
                "Proportional", "partial_rotary_factor must be at most 1", f"{share}", "Pass the share of the pairs."
            )
        object.__setattr__(self, "partial_rotary_factor", share)
        self._set_number("factor", at_least=1.0)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the default frequencies divided by factor, in radians per position. Unrotated pairs have 0."""
        rotated = self._rotated_pairs(rotary_dim)
        inv_freq = default.inv_freq(base, rotary_dim)
        return tuple(w / self.factor if i < rotated else 0.0 for i, w in enumerate(inv_freq))

    def inv_freq_float32(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Return the same frequencies as `inv_freq`, but computed in float32 as in transformers."""
        rotated = self._rotated_pairs(rotary_dim)
        slowed = default.to_floats(1.0 / default.powers_float32(base, rotary_dim) / self.factor)
        return slowed[:rotated] + (0.0,) * (rotary_dim // 2 - rotated)

    def _rotated_pairs(self, rotary_dim: int) -> int:
        rotated = int(self.partial_rotary_factor * rotary_dim // 2)
        if rotated == 0:
            raise _checks.error(
                "Proportional",
                f"at least one pair of rotary_dim={rotary_dim} must rotate",
                f"partial_rotary_factor={self.partial_rotary_factor}",
                "Increase the share, or use no Rope at all.",
            )
        return rotated
