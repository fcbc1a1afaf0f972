"""What every scheme is: plain numbers, and the rule by which they change the speed of each pair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Scheme(ABC):
    """A rule that changes `inv_freq`. Each scheme is a frozen dataclass whose fields are the keys of Hugging Face's
    `rope_parameters`, so its signature is the schema of a config."""

    rope_type: ClassVar[str]
    """The name of the scheme in a config (`rope_parameters["rope_type"]`)."""

    depends_on_length: ClassVar[bool] = False
    """Whether the frequencies are known only `at_length`."""

    @abstractmethod
    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair, scaling applied; rotary_dim // 2 float64 numbers."""

    def table_factor(self) -> float:
        """What multiplies cos and sin, dimensionless; 1.0 unless a scheme says otherwise."""
        return 1.0

    def at_length(self, n: int) -> Scheme | None:
        """The static scheme for sequences of up to n tokens: this one, or None for the default frequencies."""
        return self

    def check(self, rotary_dim: int) -> None:  # noqa: B027 (most have nothing to check)
        """Raise if this scheme cannot be that of a rope with so many rotated channels."""
