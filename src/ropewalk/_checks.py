"""RopeError, the common form of error messages, and checks of plain arguments.

A message names the context, states the requirement and the received value, and suggests a fix:

    Rope: rotary_dim must be even, since channels rotate in pairs, got 63. Pass rotary_dim=62 to leave the last channel
    unrotated.

This module imports neither torch nor NumPy, so configs can be read and rejected without them.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, cast, get_args

from ropewalk._layout import SYNONYMS, Numerics, Pairing


class RopeError(ValueError):
    """The error for an argument, a config or a file that is invalid or lacks information that ropewalk needs.

    The message names the context, the requirement, the received value and a fix. It is one printable line: control
    characters and lone surrogates, which a file may contain, are shown as escapes. Code to paste may follow it.

    Attributes:
        unread_key: the config key that `from_config` does not know and that `ignore` may name, or None.
    """

    unread_key: str | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class Assumed(str):
    """A sentence of `.warnings` about a value that a config does not state or states twice: also a Python warning."""


def error(who: str, must: str, got: str, fix: str) -> RopeError:
    """Create an error with a message in the common form.

    Args:
        who: the context, such as the name of a class or a function.
        must: the requirement.
        got: the received value, in words or as formatted by `shown` or `describe`.
        fix: one or more whole sentences that say how to fix it.
    """
    return RopeError(f"{who}: {must}, got {got}. {fix}")


OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("OPTIONS", default=None)
"""The options of the command that runs, such as "--ignore", by the name of the argument; None outside of commands."""


def argument(name: str, value: object = ...) -> str:
    """Return how the reader of a message passes an argument: as an option of the running command, or in Python.

    Args:
        name: the name of the argument in Python, such as "ignore".
        value: the value to pass; ... if only the reader knows it.
    """
    flag = (OPTIONS.get() or {}).get(name)
    if flag is None:
        return f"{name}={name.upper() if value is ... else repr(value)}"
    if value is True:
        return flag
    words = [
        name.upper() if value is ... else shlex.quote(str(v)) for v in (value if type(value) is tuple else (value,))
    ]
    return " ".join(f"{flag} {word}" for word in words)


def option(name: str) -> str:
    """Return the option of the running command for an argument, such as "--base", or the name itself in Python."""
    return (OPTIONS.get() or {}).get(name, name)


def possible(text: str, *names: str) -> str:
    """Return a part of a fix, or "" while a command runs whose options do not allow it.

    Args:
        text: the part.
        names: the arguments that it asks for; none if only Python code can follow it.
    """
    options = OPTIONS.get()
    return text if options is None or (names and all(name in options for name in names)) else ""


def with_context(where: str, e: RopeError) -> RopeError:
    """Return a RopeError whose message is that of `e`, preceded by the name of a place.

    Args:
        where: the place that the error is about, such as a file or a key.
        e: the error.
    """
    return RopeError(f"{where}: {e}")


def without_fix(e: RopeError) -> str:
    """Return the message of an error without its fix, for a value that the reader of the message did not choose."""
    return str(e).partition(". ")[0]


def missing_package(who: str, package: str, extra: str) -> RopeError:
    """Create the error for an optional package that is not installed. `extra` is the extra of ropewalk that has it."""
    return RopeError(f'{who}: {package} must be installed. Run pip install ".[{extra}]" in a clone of ropewalk.')


def unreadable_file(where: str, e: Exception) -> RopeError:
    """Create the error for a file that the system cannot read."""
    return RopeError(f"{where}: cannot be read: {e}.")


def error_from(action: str, e: BaseException, fix: str, place: str = "") -> RopeError:
    """Wrap an exception raised by other code in a RopeError.

    Args:
        action: what failed.
        e: the exception. Its type and the first line of its message are quoted.
        fix: one or more whole sentences that say how to fix it.
        place: where it was raised, to follow the message.
    """
    return RopeError(f"{action}: {type(e).__name__}: {message_of(e).rstrip('.')}{place}. {fix}")


def message_of(e: BaseException) -> str:
    """Return the message of an exception as one line of bounded length, even if its own `__str__` raises."""
    try:
        lines = str(e).strip().split("\n")
        of_script = "in the TorchScript interpreter" in lines[0]  # whose last line has the type and the reason
        return printable((lines[-1].partition(": ")[2] if of_script else lines[0])[:_MAX_SHOWN])
    except Exception:  # the exception's own __str__ may raise anything
        return "?"


def printable(text: str) -> str:
    """Return the text on one line, with control characters and lone surrogates escaped as in a Python string."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object) -> str:
    """Return a repr of bounded length, so that messages stay short, even for a value whose own `__repr__` raises."""
    try:
        text = printable(_short.repr(value))
    except Exception:  # the value's own __repr__ may raise anything
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 4 :]}"


def describe(value: object) -> str:
    """Return the dtype and shape of a tensor as text, or the result of `shown` for any other value."""
    torch = sys.modules.get("torch")  # if a tensor exists, torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return shown(value)


def short_key(key: object) -> str:
    """Return a config key as text for a message: a short string without quotes, or the result of `shown`."""
    return key if isinstance(key, str) and len(key) <= _MAX_SHOWN // 2 else shown(key)


# Far above any model (the widest known head has 512 channels). It keeps a corrupt config from filling the memory.
MAX_HEAD_DIM = 65_536

_MAX_SHOWN = 300  # characters


class _Short(reprlib.Repr):
    """A `reprlib.Repr` that also formats huge integers and bytes quickly.

    Python itself refuses to format an integer of more than 4,300 digits.
    """

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 4096:
            return f"<an integer of {x.bit_length()} bits>"
        return super().repr_int(x, level)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return self.repr_instance(x[: self.maxother], level)


_short = _Short()
_short.maxstring = _short.maxother = 80
_short.maxlong = 40
_short.maxlevel = 3


def integer(who: str, name: str, value: Any, *, at_least: int, at_most: int | None = None, fix: str = "") -> int:
    """Return `value` as an int in [at_least, at_most]. Booleans and floats are rejected, not converted."""
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or int(value) < at_least
        or (at_most is not None and int(value) > at_most)
    ):
        raise error(who, f"{name} must be an integer {bounds}", shown(value), fix or f"Pass a plain integer as {name}.")
    return int(value)


def boolean(who: str, name: str, value: Any, fix: str = "Pass a bool.") -> bool:
    """Return `value` after checking that it is True or False."""
    if not isinstance(value, bool):
        raise error(who, f"{name} must be True or False", shown(value), fix)
    return value


def check_pairing(who: str, value: object) -> Pairing:
    """Return `value` if it is the name of a pairing. Otherwise, raise an error that lists the names."""
    choice(who, "pairing", value, get_args(Pairing))
    return cast(Pairing, value)


def check_numerics(who: str, value: object) -> Numerics:
    """Return `value` if it is a name in `Numerics`. Otherwise, raise an error that lists the names."""
    choice(who, "numerics", value, get_args(Numerics))
    return cast(Numerics, value)


def length(who: str, name: str, value: Any, *, at_least: int = 1) -> int:
    """Return `value`, a number of tokens, as an int in [at_least, 2⁵³].

    The upper bound keeps arithmetic with floats from overflowing.
    """
    result = integer(who, name, value, at_least=at_least)
    if result > 2**53:
        raise error(who, f"{name} must be a number of tokens", "more than 2**53", "Check the number.")
    return result


def number(
    who: str,
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    fix: str = "",
) -> float:
    """Return `value` as a finite float within the bounds. Booleans are rejected."""
    bound = "" if above is None else f" greater than {above:g}"
    bound = bound if at_least is None else f" of at least {at_least:g}"
    bound = bound if at_most is None else f"{bound} and at most {at_most:g}"
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if (
            math.isfinite(result)
            and (above is None or result > above)
            and (at_least is None or result >= at_least)
            and (at_most is None or result <= at_most)
        ):
            return result
    raise error(who, f"{name} must be a finite number{bound}", shown(value), fix or f"Pass a plain number as {name}.")


def attention_factor(who: str, value: Any) -> float:
    """Return `value`, by which cos and sin are multiplied, as a float from 2⁻⁶³ to 2⁶³.

    `Rotation.inverse` divides by the square of the factor, so float32 must represent the square and its inverse.
    """
    return number(who, "attention_factor", value, at_least=2.0**-63, at_most=2.0**63)


def choice(who: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Raise an error that lists the choices unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        suggestion = ""
        if isinstance(value, str):
            name_here = SYNONYMS.get(value.lower().replace("_", "-").replace(" ", "-"))
            suggestion = "" if name_here == "" else nearest(value, choices)
            suggestion = f" Did you mean {name_here!r}?" if name_here in choices else suggestion
        raise error(who, f"{name} must be one of {listed}", shown(value), f"Pass one of them as {name}.{suggestion}")


_MAX_COMPARED = 100  # characters; no name is longer, and difflib takes seconds for a word of megabytes


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return ` Did you mean 'rope_theta'?` with the most similar known word, or an empty string if none is similar.

    Args:
        word: the unknown word.
        known: the known words.
        likeness: the required similarity, from 0 to 1 (equal words).
    """
    if len(word) > _MAX_COMPARED:
        return ""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""
