"""How fast does each pair rotate? One scheme, one file; each a frozen dataclass of plain numbers.

A new scheme is its file and one line at the end of this one.
"""

from __future__ import annotations

from typing import TypeVar

from ropewalk import _checks
from ropewalk.schemes._contract import build, check_class, frequencies
from ropewalk.schemes._scheme import LengthDependent, Scaling, Scheme, check_scaling
from ropewalk.schemes.dynamic import DynamicNTK
from ropewalk.schemes.linear import Linear
from ropewalk.schemes.llama3 import Llama3
from ropewalk.schemes.longrope import LongRoPE
from ropewalk.schemes.ntk import NTK
from ropewalk.schemes.per_pair import PerPair
from ropewalk.schemes.proportional import Proportional
from ropewalk.schemes.yarn import YaRN

__all__ = [
    "ALIASES",
    "BY_NAME",
    "NTK",
    "SCHEMES",
    "DynamicNTK",
    "LengthDependent",
    "Linear",
    "Llama3",
    "LongRoPE",
    "PerPair",
    "Proportional",
    "Scaling",
    "Scheme",
    "YaRN",
    "build",
    "check_scaling",
    "frequencies",
    "register",
    "unregister",
]

SCHEMES: dict[str, type[Scaling]] = {}
"""rope_type of a config → scheme. "default" is no scheme; `NTK` is "dynamic" with alpha; no config names `PerPair`."""

BY_NAME: dict[str, type[Scaling]] = {}
"""Name of the class → scheme: every one that is registered."""

ALIASES = {"mrope": "default", "xdrope": "dynamic"}
"""Another name in configs → rope_type. "mrope" and Hunyuan's "xdrope" say that tokens have several axes."""

_Class = TypeVar("_Class", bound=type[Scaling])


def register(scheme: _Class) -> _Class:
    """Make a scheme known to `from_config`, `ModelRopes.explain` and checkpoints of the lab; a class decorator.

    It is known in this process, from here on. The command `ropewalk explain` is a process of its own, which cannot know
    it: call `from_config(path).explain()` where the scheme is registered.

    Args:
        scheme: a frozen dataclass, subclass of `Scheme` or `LengthDependent`.

    Raises:
        RopeError: it is not such a class, or has no `rope_type`; a scheme of that name, rope_type or alias exists.

    Example:
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
        must = "names of a class and of a rope_type must belong to one scheme"
        raise _checks.error("schemes.register", must, ", ".join(sorted(taken)), "Choose another name.")
    BY_NAME[scheme.__name__] = scheme
    if scheme.in_configs:
        SCHEMES[scheme.rope_type] = scheme
        ALIASES.update(dict.fromkeys(scheme.aliases, scheme.rope_type))
    return scheme


def unregister(scheme: type[Scaling]) -> None:
    """Forget a scheme that was registered, as a test does with one of its own.

    Raises:
        RopeError: it is not registered.
    """
    if scheme not in BY_NAME.values():
        must, cure = "scheme must be one that is registered", "Pass what register was given."
        raise _checks.error("schemes.unregister", must, _checks.shown(scheme), cure)
    del BY_NAME[scheme.__name__]
    if scheme.in_configs:
        del SCHEMES[scheme.rope_type]
        for name in scheme.aliases:
            del ALIASES[name]


for _known in (DynamicNTK, Linear, Llama3, LongRoPE, NTK, PerPair, Proportional, YaRN):
    register(_known)
