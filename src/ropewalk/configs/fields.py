"""`Fields`: a config of any format with typed access to its keys, and what was found out about it on the way.

Errors name the file and the key. Every key that is requested is recorded, so that `unread_keys.py` can find keys about
rotation that nothing requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import MAX_HEAD_DIM, RopeError, error, integer, length, number, shown, with_context

# The deepest models have about a hundred layers. The bound keeps a corrupt file from exhausting memory.
MAX_LAYERS = 10_000
# Larger than any size in a model. The bound keeps float arithmetic from overflowing.
_MAX_SIZE = 2**53


ROPE_WORDS = frozenset({"rope", "rotary", "theta", "yarn", "ntk"})
"""A key with one of these words concerns rotation. Ignoring such a key silently can break a model."""


@dataclass(frozen=True)
class ConfigValue:
    """A value in a config, and the key that it was read from.

    Attributes:
        value: the value.
        where: the key with its section, e.g. "rope_scaling.factor".
        own: False if `rope_parameters` has objects for kinds of layers and the key is next to these objects. Such a key
            applies to every kind whose scheme reads it. For the other kinds it has no effect, and is not an error.
        origin: what `.origins` says of a value that was computed from the key; "" for the key itself.
    """

    value: Any
    where: str
    own: bool = True
    origin: str = ""


class Fields:
    """A config with typed access to its keys.

    A null value counts as missing. "a.b" names the key b inside the object a, unless the config has a key "a.b".

    Attributes:
        config: the config.
        source: the name of the config, with which every message begins.
        path: the prefix of this config's keys in `from_config(ignore=...)`, e.g. "text_config."; "" at the top level.
        passed_base: the argument `base` of from_config, or None.
        read_keys: the keys that have been requested so far.
        origins: maps the name of a value, such as "base", to the key that it came from.
        warnings: sentences for the user.
    """

    flag_types: tuple[type, ...] = (int, float)
    flags = "numbers of at least 0"
    """The types of the entries of a list of flags, and what these entries are, for messages."""
    list_fix = "Check that it is the list of this model."
    """The fix for a list that does not fit the layers."""
    further_key = "num_nextn_predict_layers"
    """The key of the number of layers that follow the others and predict further tokens."""
    missing_list_fix = "Add a list with one entry for each layer."

    def __init__(self, config: Mapping[str, Any], source: str, path: str = "", *, base: float | None = None) -> None:
        self.config = config
        self.source = source
        self.path = path
        self.passed_base = base
        self.read_keys: set[str] = set()
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def full(self, key: str) -> str:
        """Return the name of a key as messages and origins state it. GGUF files have a prefix before each name."""
        return key

    def record_origin(self, name: str, where: str) -> None:
        """Record the key that a value came from. If layers read the value from different keys, "and" joins the keys."""
        previous = self.origins.get(name)
        known = previous is not None and where in previous.split(" and ")
        self.origins[name] = where if previous is None else previous if known else f"{previous} and {where}"

    def error(self, key: str, must: str, got: str, fix: str) -> RopeError:
        """Return an error about a key. `must` is the requirement on its value, e.g. "must be an object"."""
        return error(self.source, f"{self.full(key)} {must}", got, fix)

    def unread(self, key: str, must: str, got: str, fix: str) -> RopeError:
        """Return an error about a key that ropewalk does not know for this model, and that the caller may ignore."""
        e = self.error(key, must, got, fix)
        e.unread_key = self.path + key
        return e

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the value of the key, or None if it is missing."""
        return self._look_up(key)[1]

    def is_null(self, *keys: str) -> bool:
        """Whether at least one of the keys is present and null."""
        return any(present and value is None for present, value in map(self._look_up, keys))

    def _look_up(self, key: str) -> tuple[bool, Any]:
        """Return whether the key is present, and its value."""
        if key in self.config or "." not in key:
            self.read_keys.add(key)
            return key in self.config, self.config.get(key)
        section, _, inner = key.rpartition(".")
        self.read_keys.add(section)
        values = self.config.get(section)
        return (inner in values, values.get(inner)) if isinstance(values, Mapping) else (False, None)

    def first_present(self, keys: tuple[str, ...]) -> str:
        """Return the first of the keys that has a value, or the first key if none has."""
        return next((key for key in keys if self.has(key)), keys[0])

    def size(self, keys: str | tuple[str, ...], *, at_most: int | None = None, fix: str = "") -> int:
        """Return the value of the first key that has one, as an integer of at least 1."""
        key = self.first_present((keys,) if isinstance(keys, str) else keys)
        value = integer(self.source, self.full(key), self.get(key), at_least=1, at_most=at_most, fix=fix)
        if value > _MAX_SIZE:
            raise self.error(key, "must be at most 2**53", "more", "Check the number.")
        return value

    def channels(self, key: str) -> int:
        """Return the value of the key as a number of channels of a head.

        Every size of a head is read with this method or with `head_width`, so nothing is built for a larger head than a
        `Rope` may have.
        """
        return self._channels(self.full(key), self.get(key))

    def _channels(self, where: str, value: Any) -> int:
        fix = "It is a number of channels of one head."
        return integer(self.source, where, value, at_least=2, at_most=MAX_HEAD_DIM, fix=fix)

    def head_width(self, widths: tuple[str, ...], heads: tuple[str, ...], own: str, *, fix: str = "") -> int:
        """Return width / number of heads, the head_dim of a config that does not have the key `own`."""
        width, count = self.size(widths, fix=fix), self.size(heads, fix=fix)
        if width % count:
            must = f"must be a multiple of {self.full(self.first_present(heads))}={count} if {own} is not given"
            raise self.error(self.first_present(widths), must, str(width), f"Add {own}.")
        return self._channels(self.quotient(widths, heads), width // count)

    def quotient(self, widths: tuple[str, ...], heads: tuple[str, ...]) -> str:
        """Return "width / heads" with the names of the keys that have a value."""
        return " / ".join(self.full(self.first_present(keys)) for keys in (widths, heads))

    def length(self, key: str) -> int | None:
        """Return the value of the key as a number of tokens, or None if it is missing."""
        return length(self.source, self.full(key), self.get(key)) if self.has(key) else None

    def number(self, key: str, *, above: float | None = None, at_least: float | None = None) -> float | None:
        """Return the value of the key as a finite number within the bounds, or None if it is missing."""
        if not self.has(key):
            return None
        return number(self.source, self.full(key), self.get(key), above=above, at_least=at_least)

    def check_base(self, where: str, value: Any) -> float:
        """Return a base from the config as a number. If the caller passed a base, both must be equal.

        Args:
            where: the key of the base, for messages.
            value: the value of the key.
        """
        base = number(self.source, self.full(where), value, above=1.0)
        if self.passed_base not in (None, base):
            must = f"is {base:g}, and base must agree with it"
            fix = "Omit base, or use dataclasses.replace(rope, base=...)."
            raise self.error(where, must, f"base={self.passed_base:g}", fix)
        return base

    @contextmanager
    def prefix_errors(self) -> Iterator[None]:
        """Prefix every RopeError raised in this context with the name of the config."""
        try:
            yield
        except RopeError as e:
            raise e if str(e).startswith(self.source) else with_context(self.source, e) from None

    def boolean(self, key: str, default: bool) -> bool:
        """Return the value of the key, which must be true or false, or `default` if it is missing."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", shown(value), "Write true or false.")
        return value

    def layers(self, keys: tuple[str, ...]) -> int:
        """Return the number of layers, at most MAX_LAYERS."""
        return self.size(keys, at_most=MAX_LAYERS)

    def optional_count(self, key: str, *, at_most: int) -> int:
        """Return the value of the key as a number of layers, or 0 if it is missing."""
        return integer(self.source, key, self.get(key), at_least=0, at_most=at_most) if self.has(key) else 0

    def layer_list(self, key: str, count: int) -> list[Any] | None:
        """Return the value of the key as a list with one entry for each of `count` layers, or None if it is missing.

        If the list also has entries for the layers that `further_key` counts, these entries are dropped.
        """
        value = self.get(key)
        if value is None:
            return None
        further = self.get(self.further_key)
        if isinstance(value, (list, tuple)) and type(further) is int and len(value) == count + further > count:
            value = value[:count]
        if not isinstance(value, (list, tuple)) or len(value) != count:
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else shown(value)
            raise self.error(key, f"must be a list with an entry for each of the {count} layers", got, self.list_fix)
        return list(value)
