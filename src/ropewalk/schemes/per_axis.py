"""A scheme for each axis, such as NTK for the rows and columns of an image, but not for its third axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import Scheme


@dataclass(frozen=True)
class PerAxis(Scheme):
    """A scheme for each axis, which scales the channels of the axis like those of a head, and counts its positions.

    Args:
        schemes: for each axis, a scheme that is the same at every length, or None for the default frequencies.

    Raises:
        RopeError: a value is no such scheme; the schemes have different attention factors; or the rope has another
            number of axes.

    Examples:
        >>> from ropewalk import NTK, Axes, Rope
        >>> Rope(8, 1e4, "half", axes=Axes.axial((4, 4)), scaling=PerAxis([None, NTK(4.0)])).inv_freq
        array([1.    , 0.01  , 1.    , 0.0025])
    """

    rope_type: ClassVar[str] = "per_axis"
    in_configs: ClassVar[bool] = False
    per_axis: ClassVar[bool] = True
    schemes: tuple[Scheme | None, ...]

    def __post_init__(self) -> None:
        given: Any = self.schemes
        if not isinstance(given, (list, tuple)) or not all(s is None or isinstance(s, Scheme) for s in given):
            must = "schemes must be a list of schemes that are the same at every length, or None"
            raise _checks.error("PerAxis", must, _checks.shown(given), "Pass one for each axis.")
        object.__setattr__(self, "schemes", tuple(given))
        factors = [1.0 if scheme is None else scheme.compute_attention_factor() for scheme in given]
        if len(set(factors)) > 1:
            must, fix = "all axes must have one attention factor", "Pass attention_factor=1.0 to YaRN."
            raise _checks.error("PerAxis", must, _checks.shown(factors), fix)

    def of_axes(self, count: int) -> list[Scheme | None]:
        if count != len(self.schemes):
            fix = "Pass a scheme, or None, for each axis of the positions."
            raise _checks.error("PerAxis", f"schemes must have {count}, one for each axis", str(len(self.schemes)), fix)
        return list(self.schemes)

    def inv_freq(self, base: float, rotary_dim: int) -> tuple[float, ...]:
        [scheme] = self.of_axes(1)
        return (default if scheme is None else scheme).inv_freq(base, rotary_dim)

    def facts(self) -> dict[str, Any]:
        return {"rope_type": self.rope_type, "schemes": [None if s is None else s.facts() for s in self.schemes]}
