"""Check the class, the construction and the return values of every scheme, including schemes of other packages."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

from ropewalk import _checks
from ropewalk.schemes._scheme import LengthDependent, Scaling, Scheme

_FIX = "Check the value. A scheme must validate its values in __post_init__ and raise a RopeError."


def build(scheme: type[Scaling], values: Mapping[str, Any]) -> Scaling:
    """Build a scheme from the values of a file.

    Args:
        scheme: the class.
        values: maps each field to its value.

    Raises:
        RopeError: the error that the scheme raises; or, if it raises another exception or is not hashable, an error
            with the name and values of the scheme.
    """
    try:
        instance = scheme(**values)
        hash(instance)  # a rope is hashable, so everything in it must be
    except _checks.RopeError:
        raise
    except Exception as e:  # a scheme from outside may raise anything
        arguments = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items()) or "no values"
        raise _checks.error_from(f"{scheme.__name__} could not be built from {arguments}", e, _FIX) from e
    return instance


def frequencies(scheme: Scaling, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float] | None:
    """Return the checked inv_freq and attention factor of a scheme, or None if they depend on the length.

    Raises:
        RopeError: the scheme raises a RopeError or another exception, or returns an invalid value.
    """
    try:
        result = scheme.frequencies(base, rotary_dim)
    except _checks.RopeError:
        raise
    except Exception as e:  # a scheme from outside may raise anything
        failure = f"Rope: the frequencies of {_checks.shown(scheme)} could not be computed"
        raise _checks.error_from(failure, e, _FIX) from e
    if result is None and isinstance(scheme, LengthDependent):
        return None
    if not isinstance(result, tuple) or len(result) != 2:
        must = f"frequencies of {_checks.shown(scheme)} must return inv_freq and the attention factor"
        must += " (only a LengthDependent may return None)" if result is None else ""
        raise _checks.error("Rope", must, _checks.shown(result), "Subclass Scheme and override inv_freq.")
    inv_freq, factor = result
    pairs = rotary_dim // 2
    must = f"inv_freq of {_checks.shown(scheme)} must be a tuple of rotary_dim // 2 = {pairs} finite numbers"
    fix = "Return the frequency of each pair in radians per position, and 0.0 for a pair that does not rotate."
    if not isinstance(inv_freq, tuple) or len(inv_freq) != pairs:
        got = f"{len(inv_freq)} numbers" if isinstance(inv_freq, tuple) else _checks.shown(inv_freq)
        raise _checks.error("Rope", must, got, fix)
    try:
        inv_freq = tuple(_checks.number("Rope", "inv_freq", w) for w in inv_freq)
    except _checks.RopeError:
        raise _checks.error("Rope", must, _checks.shown(inv_freq), fix) from None
    return inv_freq, _checks.attention_factor("Rope", factor)


def check_class(scheme: object) -> None:
    """Raise a RopeError unless `schemes.register` can accept the class: a complete, frozen scheme with a rope_type."""
    who = "schemes.register"
    if not isinstance(scheme, type) or not issubclass(scheme, (Scheme, LengthDependent)):
        must, fix = "scheme must be a subclass of Scheme or LengthDependent", "Pass the class, not an instance."
        raise _checks.error(who, must, _checks.shown(scheme), fix)
    name = scheme.__name__
    if missing := sorted(scheme.__abstractmethods__):
        must, fix = f"{name} must implement every abstract method of Scheme", "Implement the missing methods."
        raise _checks.error(who, must, f"a class without {', '.join(missing)}", fix)
    options = vars(scheme).get("__dataclass_params__")
    if options is None or not (options.frozen and options.eq):
        must = f"{name} must be a frozen dataclass that is compared by value"
        got = "a class without @dataclass" if options is None else f"{options!r:.80}"
        raise _checks.error(who, must, got, "Decorate it with @dataclass(frozen=True).")
    fields = {f.name for f in dataclasses.fields(cast(Any, scheme))}
    for attribute in fields & {
        "rope_type",
        "aliases",
        "in_configs",
        "keys_without_effect",
        "gguf",
        "whole_head",
        "per_axis",
    }:
        must = f"{attribute} of {name} must be a class variable"
        raise _checks.error(who, must, "a dataclass field", "Annotate it with ClassVar, or remove the annotation.")
    _check_names(who, scheme)


def _check_names(who: str, scheme: type[Scaling]) -> None:
    """Raise a RopeError unless rope_type and the aliases are non-empty strings."""
    name, rope_type = scheme.__name__, inspect.getattr_static(scheme, "rope_type", None)
    if not isinstance(rope_type, str) or not rope_type:
        got = "none" if rope_type is None else _checks.shown(rope_type)
        fix = 'Set rope_type = "..." in the class: it is the name of the scheme in configs.'
        raise _checks.error(who, f"rope_type of {name} must be a non-empty string", got, fix)
    aliases: object = scheme.aliases
    if not isinstance(aliases, tuple) or not all(isinstance(alias, str) and alias for alias in aliases):
        must, fix = (
            f"aliases of {name} must be a tuple of non-empty strings",
            'Set aliases = ("...",), or () for none.',
        )
        raise _checks.error(who, must, _checks.shown(aliases), fix)
