"""The schemes, which define how fast each pair rotates. Each is a frozen dataclass of plain numbers in its own file.

To add a scheme, add its file, and register its class at the end of this file; or in `_LATER`, if few models need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk import _checks
from ropewalk.schemes import default
from ropewalk.schemes._scheme import LengthDependent, Scaling, Scheme, build, check_class, check_scaling, frequencies
from ropewalk.schemes.dynamic import DynamicNTK
from ropewalk.schemes.linear import Linear
from ropewalk.schemes.llama3 import Llama3
from ropewalk.schemes.longrope import LongRoPE
from ropewalk.schemes.ntk import NTK
from ropewalk.schemes.per_pair import PerPair
from ropewalk.schemes.proportional import Proportional
from ropewalk.schemes.yarn import YaRN

if TYPE_CHECKING:
    from ropewalk.schemes.lerope import LeRoPE
    from ropewalk.schemes.per_axis import PerAxis
    from ropewalk.schemes.reversed import Reversed
    from ropewalk.schemes.riflex import RIFLEx
    from ropewalk.schemes.telechat3 import TeleChat3

__all__ = [
    "ALIASES",
    "BY_NAME",
    "NTK",
    "SCHEMES",
    "DynamicNTK",
    "LeRoPE",
    "LengthDependent",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PerAxis",
    "PerPair",
    "Proportional",
    "RIFLEx",
    "Reversed",
    "Scaling",
    "Scheme",
    "TeleChat3",
    "YaRN",
    "build",
    "check_scaling",
    "default",
    "frequencies",
    "register",
    "unregister",
]
__dir__ = __all__.copy

_LATER = {
    "LeRoPE": ("lerope", ""),
    "PerAxis": ("per_axis", ""),
    "RIFLEx": ("riflex", ""),
    "Reversed": ("reversed", ""),
    "TeleChat3": ("telechat3", "telechat3-yarn"),
}
"""Maps the class of each scheme that is imported when it is used to its module and its rope_type in configs."""


class _Found(MutableMapping[str, type[Scaling]]):
    """Maps names to schemes. A scheme of `_LATER` is imported when its value is read."""

    def __init__(self) -> None:
        self._schemes: dict[str, type[Scaling] | str] = {}

    def __getitem__(self, name: str) -> type[Scaling]:
        scheme = self._schemes[name]
        return __getattr__(scheme) if isinstance(scheme, str) else scheme

    def __setitem__(self, name: str, scheme: type[Scaling] | str) -> None:
        self._schemes[name] = scheme

    def __delitem__(self, name: str) -> None:
        del self._schemes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemes)

    def __len__(self) -> int:
        return len(self._schemes)

    def __contains__(self, name: object) -> bool:
        return name in self._schemes


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name][0]}"), name)


SCHEMES = _Found()
"""Maps the rope_type of a config to its scheme. "default" has none. `NTK` is "dynamic" with alpha, and `PerPair` has no
rope_type in configs, so neither is a value here."""

BY_NAME = _Found()
"""Maps class names to schemes: every registered scheme."""

ALIASES = {"mrope": "default", "xdrope": "dynamic", "deepseek_yarn": "yarn"}
"""Maps other names in configs to a rope_type.

"mrope" and Hunyuan's "xdrope" mean that tokens have several axes. Engines have "deepseek_yarn" for YaRN.
"""


_Class = TypeVar("_Class", bound=type[Scaling])


def register(scheme: _Class) -> _Class:
    """Register a scheme for `from_config` and `ModelRopes.explain`; usable as a decorator.

    The registration holds in this process only. The command `ropewalk explain` runs in another process and does not see
    it, so call `from_config(path).explain()` in the process that registers the scheme.

    Args:
        scheme: a frozen dataclass that subclasses `Scheme` or `LengthDependent`.

    Returns:
        The same class.

    Raises:
        RopeError: the class is not such a dataclass or has no `rope_type`, or another scheme already has its name, its
            rope_type or one of its aliases.

    Examples:
        >>> from dataclasses import dataclass
        >>> from ropewalk import Rope, schemes
        >>> @schemes.register
        ... @dataclass(frozen=True)
        ... class Slower(schemes.Scheme):
        ...     rope_type = "slower"
        ...     times: float
        ...
        ...     def inv_freq(self, base, rotary_dim):
        ...         return tuple(w / self.times for w in schemes.default.inv_freq(base, rotary_dim))
        >>> Rope(4, 10_000.0, "half", scaling=Slower(2.0)).inv_freq
        array([0.5  , 0.005])
        >>> schemes.unregister(Slower)
    """
    check_class(scheme)
    taken = {"default", *SCHEMES, *ALIASES} & {scheme.rope_type, *scheme.aliases}
    taken |= BY_NAME.keys() & {scheme.__name__}
    if taken:
        must = "the class name, rope_type and aliases must not belong to another scheme"
        raise _checks.error("schemes.register", must, ", ".join(sorted(taken)), "Choose other names.")
    BY_NAME[scheme.__name__] = scheme
    if scheme.in_configs:
        SCHEMES[scheme.rope_type] = scheme
        ALIASES.update(dict.fromkeys(scheme.aliases, scheme.rope_type))
    return scheme


def unregister(scheme: type[Scaling]) -> None:
    """Remove a registered scheme, for example at the end of a test.

    Raises:
        RopeError: the scheme is not registered.
    """
    if scheme not in BY_NAME.values():
        must, fix = "scheme must be a registered class", "Pass the class that was passed to register."
        raise _checks.error("schemes.unregister", must, _checks.shown(scheme), fix)
    del BY_NAME[scheme.__name__]
    if scheme.in_configs:
        del SCHEMES[scheme.rope_type]
        for name in scheme.aliases:
            del ALIASES[name]


for _scheme_class in (DynamicNTK, Linear, Llama3, LongRoPE, NTK, PerPair, Proportional, YaRN):
    register(_scheme_class)
for _name, (_, _rope_type) in _LATER.items():
    BY_NAME[_name] = _name
    if _rope_type:
        SCHEMES[_rope_type] = _name
