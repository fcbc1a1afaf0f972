"""The fields of a config: typed access that names file and key when something is not as it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ropewalk._checks import RopeError, error, integer, number, shown, within

# The deepest model has some hundred layers; this keeps a corrupt file from filling the memory.
MAX_LAYERS = 10_000
# Far above any size of a model; it keeps arithmetic with floats from overflowing.
_MAX_SIZE = 2**53


# A key with one of these words is about rotation: reading past one is how a model breaks.
ROPE_WORDS = frozenset({"rope", "rotary", "theta", "yarn", "ntk"})


@dataclass(frozen=True)
class Given:
    """A value and the key it stands under.

    `where` is the key. `own` is false for a key of flat `rope_parameters` that stands beside nested ones: it belongs to
    those kinds of layers whose scheme reads it.
    """

    value: Any
    where: str
    own: bool = True


class Fields:
    """A config and what to call it in messages. A key that is null counts as not given; "a.b" is b inside a.

    Attributes:
        config: the config.
        source: what messages begin with.
        path: what stands before a key of this config in the names that `from_config(ignore=...)` takes.
        read: the keys that somebody has asked for.
    """

    def __init__(self, config: Mapping[str, Any], source: str, path: str = "") -> None:
        self.config = config
        self.source = source
        self.path = path
        self.read: set[str] = set()

    def error(self, key: str, must: str, got: str, cure: str) -> RopeError:
        """The error that `key` does not hold what it must."""
        return error(f"{self.source}: {key}", must, got, cure)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of the key, None if it is not given."""
        return self._found(key)[1]

    def is_null(self, *keys: str) -> bool:
        """Whether one of the keys stands there and is null."""
        return any(found and value is None for found, value in map(self._found, keys))

    def _found(self, key: str) -> tuple[bool, Any]:
        if key in self.config or "." not in key:
            self.read.add(key)
            return key in self.config, self.config.get(key)
        section, _, inner = key.rpartition(".")
        self.read.add(section)
        within = self.config.get(section)
        return (inner in within, within.get(inner)) if isinstance(within, Mapping) else (False, None)

    def first(self, keys: tuple[str, ...]) -> str:
        """The first of the keys that is given; the first of all if none is."""
        return next((key for key in keys if self.has(key)), keys[0])

    def size(self, keys: str | tuple[str, ...], *, at_most: int | None = None, cure: str = "") -> int:
        """The first of the keys that is given, as an integer of at least 1."""
        key = self.first((keys,) if isinstance(keys, str) else keys)
        value = integer(self.source, key, self.get(key), at_least=1, at_most=at_most, cure=cure)
        if value > _MAX_SIZE:
            raise self.error(key, "it must be a size of a model", "more than 2**53", "Is the number right?")
        return value

    def head_width(self, widths: tuple[str, ...], heads: tuple[str, ...], own: str, *, cure: str = "") -> int:
        """The width of the model by its number of heads: the head_dim of a file that does not state it as `own`."""
        width, count = self.size(widths, cure=cure), self.size(heads, cure=cure)
        if width % count:
            must = f"it must be a multiple of {self.first(heads)}={count} where {own} is not given"
            raise self.error(self.first(widths), must, str(width), f"Add {own}.")
        return width // count

    def base(self, where: str, value: Any, passed: float | None) -> float:
        """The base that the file states at `where`, which one passed to from_config must agree with."""
        base = number(self.source, where, value, above=1.0)
        if passed not in (None, base):
            must = f"it is {base:g}, and base must agree with it"
            cure = "Leave base out, or use dataclasses.replace(rope, base=...)."
            raise self.error(where, must, f"base={passed:g}", cure)
        return base

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of what is built inside begin with the name of the file."""
        try:
            yield
        except RopeError as e:
            raise e if str(e).startswith(self.source) else within(self.source, e) from None

    def boolean(self, key: str, default: bool) -> bool:
        """The key as true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false", shown(value), "Write true or false.")
        return value

    def layers(self, keys: tuple[str, ...]) -> int:
        """The number of layers, bounded."""
        return self.size(keys, at_most=MAX_LAYERS)

    def count(self, key: str, *, at_most: int) -> int:
        """The key as a number of layers, 0 where it is not given."""
        return integer(self.source, key, self.get(key), at_least=0, at_most=at_most) if self.has(key) else 0

    def listed(self, key: str, length: int) -> list[Any] | None:
        """The key as a list with one entry for each layer; None if it is not given.

        Entries after that are those of the layers that predict further tokens, `num_nextn_predict_layers`.
        """
        value = self.get(key)
        if value is None:
            return None
        further = self.get("num_nextn_predict_layers")
        if isinstance(value, (list, tuple)) and type(further) is int and len(value) == length + further > length:
            value = value[:length]
        if not isinstance(value, (list, tuple)) or len(value) != length:
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else shown(value)
            cure = "Is it the list of another model?"
            raise self.error(key, f"it must be a list with an entry for each of the {length} layers", got, cure)
        return list(value)
