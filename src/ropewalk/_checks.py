"""Every check of a plain argument, and the one form of its message.

A message says who speaks, what must hold, what came, and the cure:

    Rope: rotary_dim must be even, got 63. Pass 62 or 64.

Nothing here imports torch or NumPy, so a config can be read and refused without either.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import sys
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any, cast, get_args

from ropewalk._layout import Numerics, Pairing


class RopeError(ValueError):
    """An argument, a config or a file does not say what ropewalk needs to know.

    The message names who refused, what must hold, what came instead, and what to do. It is one line that every
    terminal can show: control characters and lone surrogates, which a file may hold, stand in it as escapes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


def error(who: str, must: str, got: str, cure: str) -> RopeError:
    """The one form of every message: who, what must hold, what came (in words, `shown` or `described`), cure."""
    return RopeError(f"{who}: {must}, got {got}. {cure}")


def within(where: str, e: RopeError) -> RopeError:
    """The same error, with what it is about in front."""
    return RopeError(f"{where}: {e}")


def unreadable(where: str, e: Exception) -> RopeError:
    """The error that the system cannot read a file."""
    return RopeError(f"{where}: cannot be read: {e}.")


def failed(what: str, e: Exception, cure: str) -> RopeError:
    """The error that code from outside raised something else: what could not be done, what it raised, cure."""
    try:
        said = str(e)[:_MOST_SHOWN]
    except Exception:  # whatever the exception's own str raises
        said = "?"
    return RopeError(f"{what}: {type(e).__name__}: {said.rstrip('.')}. {cure}")


def printable(text: str) -> str:
    """The text on one line; control characters and lone surrogates become escapes, as in a Python string."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object) -> str:
    """A repr of bounded length that works for any value: no message grows with what it complains about."""
    try:
        text = printable(_short.repr(value))
    except Exception:  # whatever the value's own repr raises
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]}...{text[-_MOST_SHOWN // 4 :]}"


def described(value: object) -> str:
    """A tensor by its dtype and shape; anything else as `shown`."""
    torch = sys.modules.get("torch")  # whoever has made a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return shown(value)


def short(key: object) -> str:
    """The key of a config for a message: a short string as it is, anything else `shown`."""
    return key if isinstance(key, str) and len(key) <= _MOST_SHOWN // 2 else shown(key)


# Far above any model (the widest known head has 512 channels); it keeps a corrupt config from filling the memory.
MAX_HEAD_DIM = 65_536

_MOST_SHOWN = 300  # characters


class _Short(reprlib.Repr):
    """reprlib's, for integers of any size and for bytes: Python refuses to write an integer of 4,300 digits."""

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


def integer(who: str, name: str, value: Any, *, at_least: int, at_most: int | None = None, cure: str = "") -> int:
    """`value` as an int in [at_least, at_most]; booleans and floats are refused, not converted."""
    bounds = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or int(value) < at_least
        or (at_most is not None and int(value) > at_most)
    ):
        raise error(
            who, f"{name} must be an integer {bounds}", shown(value), cure or f"Pass a plain integer as {name}."
        )
    return int(value)


def check_pairing(who: str, value: object) -> Pairing:
    """`value`, which is the name of a pairing."""
    choice(who, "pairing", value, get_args(Pairing))
    return cast(Pairing, value)


def check_numerics(who: str, value: object) -> Numerics:
    """`value`, which says how angles are rounded."""
    choice(who, "numerics", value, get_args(Numerics))
    return cast(Numerics, value)


def length(who: str, name: str, value: Any, *, at_least: int = 1) -> int:
    """A number of tokens. The upper bound is far above any, and keeps arithmetic with floats from overflowing."""
    result = integer(who, name, value, at_least=at_least)
    if result > 2**53:
        raise error(who, f"{name} must be a number of tokens", "more than 2**53", "Is the number right?")
    return result


def number(
    who: str,
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    cure: str = "",
) -> float:
    """`value` as a finite float within the bounds; booleans are refused."""
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
    raise error(who, f"{name} must be a finite number{bound}", shown(value), cure or f"Pass a plain number as {name}.")


def attention_factor(who: str, value: Any) -> float:
    """A factor of cos and sin. Its square and the square's inverse must be numbers of float32 too, for `inverse`."""
    return number(who, "attention_factor", value, at_least=2.0**-63, at_most=2.0**63)


def choice(who: str, name: str, value: Any, choices: Collection[str]) -> None:
    """`value` is one of `choices`; the message lists them."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise error(who, f"{name} must be one of {listed}", shown(value), f"Pass one of them as {name}.")


_MOST_LIKENED = 100  # characters; no name is longer, and difflib takes seconds for a word of megabytes


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """` Did you mean 'rope_theta'?` or an empty string; likeness 1 is the same word."""
    if len(word) > _MOST_LIKENED:
        return ""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""
