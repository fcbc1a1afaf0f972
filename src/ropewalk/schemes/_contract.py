"""What a scheme must keep, whoever wrote it: its class, how it is built from the values of a file, what it returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

from ropewalk import _checks
from ropewalk.schemes._scheme import LengthDependent, Scaling, Scheme

_CURE = "Is the value right? A scheme must check its values where it is built, and raise a RopeError."


def build(scheme: type[Scaling], values: Mapping[str, Any]) -> Scaling:
    """The scheme from the values of a file, field by field.

    Raises:
        RopeError: its own; or what else it raised, or that it is not hashable, with its name and the values.
    """
    try:
        made = scheme(**values)
        hash(made)  # a Rope is hashable, and so is all that it consists of
    except _checks.RopeError:
        raise
    except Exception as e:  # whatever a scheme from outside raises
        said = ", ".join(f"{name}={_checks.shown(value)}" for name, value in values.items()) or "nothing"
        raise _checks.failed(f"{scheme.__name__} could not be built from {said}", e, _CURE) from e
    return made


def frequencies(scheme: Scaling, base: float, rotary_dim: int) -> tuple[tuple[float, ...], float] | None:
    """inv_freq and attention factor of a rope with this scheme, checked; None where they depend on the length.

    Raises:
        RopeError: the scheme's own; or what else it raised; or what it returned is not that.
    """
    try:
        known = scheme.frequencies(base, rotary_dim)
    except _checks.RopeError:
        raise
    except Exception as e:  # whatever a scheme from outside raises
        what = f"Rope: the frequencies of {_checks.shown(scheme)} could not be worked out"
        raise _checks.failed(what, e, _CURE) from e
    if known is None and isinstance(scheme, LengthDependent):
        return None
    if not isinstance(known, tuple) or len(known) != 2:
        must = f"frequencies of {_checks.shown(scheme)} must be inv_freq and attention factor"
        must += ", or None only for a LengthDependent" if known is None else ""
        raise _checks.error("Rope", must, _checks.shown(known), "Subclass Scheme, and write inv_freq.")
    inv_freq, factor = known
    pairs = rotary_dim // 2
    must = f"inv_freq of {_checks.shown(scheme)} must be a tuple of rotary_dim // 2 = {pairs} finite numbers"
    cure = "Return the radians per position of each pair; 0.0 for one that stands still."
    if not isinstance(inv_freq, tuple) or len(inv_freq) != pairs:
        got = f"{len(inv_freq)} numbers" if isinstance(inv_freq, tuple) else _checks.shown(inv_freq)
        raise _checks.error("Rope", must, got, cure)
    try:
        inv_freq = tuple(_checks.number("Rope", "inv_freq", w) for w in inv_freq)
    except _checks.RopeError:
        raise _checks.error("Rope", must, _checks.shown(inv_freq), cure) from None
    return inv_freq, _checks.attention_factor("Rope", factor)


def check_class(scheme: object) -> None:
    """Raise unless `schemes.register` can take it: a finished scheme of plain numbers, with names of its own."""
    who = "schemes.register"
    if not isinstance(scheme, type) or not issubclass(scheme, (Scheme, LengthDependent)):
        must, cure = "scheme must be a subclass of Scheme or LengthDependent", "Pass the class, not an instance."
        raise _checks.error(who, must, _checks.shown(scheme), cure)
    name = scheme.__name__
    if missing := sorted(scheme.__abstractmethods__):
        must, cure = f"{name} must have every method that a scheme needs", "Write what is missing."
        raise _checks.error(who, must, f"one without {', '.join(missing)}", cure)
    made = vars(scheme).get("__dataclass_params__")
    if made is None or not (made.frozen and made.eq):
        must, cure = (
            f"{name} must be a dataclass that is frozen and compared by value",
            "Write @dataclass(frozen=True).",
        )
        raise _checks.error(who, must, "another class" if made is None else f"{made!r:.80}", cure)
    fields = {f.name for f in dataclasses.fields(cast(Any, scheme))}
    for attribute in fields & {"rope_type", "aliases", "in_configs", "idle", "gguf", "whole_head", "per_axis"}:
        must, cure = f"{attribute} of {name} must be no field", "Leave out its type, or write ClassVar."
        raise _checks.error(who, must, "one", cure)
    _check_words(who, scheme)


def _check_words(who: str, scheme: type[Scaling]) -> None:
    """rope_type and aliases are words."""
    name, rope_type = scheme.__name__, inspect.getattr_static(scheme, "rope_type", None)
    if not isinstance(rope_type, str) or not rope_type:
        got = "none" if rope_type is None else _checks.shown(rope_type)
        cure = 'It is the name in configs: write rope_type = "..." in the class.'
        raise _checks.error(who, f"rope_type of {name} must be a word", got, cure)
    aliases: object = scheme.aliases
    if not isinstance(aliases, tuple) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise _checks.error(who, f"aliases of {name} must be a tuple of words", _checks.shown(aliases), "Write ().")
