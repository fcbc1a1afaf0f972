"""The fields of a config: typed access that names file and key when something is not as it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk._checks import RopeError, error, integer, shown

# The deepest model has some hundred layers; this keeps a corrupt file from filling the memory.
MAX_LAYERS = 10_000
# Far above any size of a model; it keeps arithmetic with floats from overflowing.
_MAX_SIZE = 2**53


class Fields:
    """A config and what to call it in messages. A key that is null counts as not given."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, must: str, got: str, cure: str) -> RopeError:
        """The error that `key` does not hold what it must."""
        return error(f"{self.source}: {key}", must, got, cure)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return self.config.get(key) is not None

    def get(self, key: str) -> Any:
        """The value of the key, None if it is not given."""
        return self.config.get(key)

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

    def boolean(self, key: str, default: bool) -> bool:
        """The key as true or false."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false", shown(value), "Mend it.")
        return value

    def layers(self, keys: tuple[str, ...]) -> int:
        """The number of layers, bounded."""
        return self.size(keys, at_most=MAX_LAYERS)

    def listed(self, key: str, length: int) -> list[Any] | None:
        """The key as a list with one entry for each layer; None if it is not given."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != length:
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else shown(value)
            raise self.error(key, f"it must be a list with an entry for each of the {length} layers", got, "Mend it.")
        return list(value)
