"""Which layer is of which kind: the patterns that models have in common. One with a pattern of its own is a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk._checks import shown
from ropewalk.configs.fields import Fields

ALL = "all"
NO_ROPE = "no rope"


class Pattern(Protocol):
    """Says of which kind each layer is."""

    @property
    def decides(self) -> bool:
        """Whether it is asked before `layer_types`, and not only where those are missing."""

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """The kind of each of `count` layers; None where the config does not say."""

    def keys(self) -> set[str]:
        """The keys that it may ask for."""


@dataclass(frozen=True)
class Every:
    """Of each n layers one is `hit` (the last, or the first), the others are `miss`; n may stand under a key."""

    n: int
    hit: str
    miss: str
    key: str = ""
    first: bool = False
    decides: bool = False

    def keys(self) -> set[str]:
        """The keys that it may ask for."""
        return {self.key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """The kind of each layer."""
        stated = bool(self.key) and fields.has(self.key)
        n = fields.size(self.key) if stated else self.n
        which = "first" if self.first else "last"
        origins["layer_types"] = f"{self.key if stated else 'implied'}: the {which} of every {n} is {self.hit}"
        at = 0 if self.first else n - 1
        return [self.hit if i % n == at else self.miss for i in range(count)]


@dataclass(frozen=True)
class NoRopeLayers:
    """A list with 0 where a layer does not rotate; without it, every interval-th layer does not.

    Without `interval_key`, the list must be given.
    """

    key: str = "no_rope_layers"
    interval_key: str = "no_rope_layer_interval"
    interval: int = 4
    decides: bool = True

    def keys(self) -> set[str]:
        """The keys that it may ask for."""
        return {self.key, self.interval_key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """The kind of each layer."""
        listed = fields.listed(self.key, count) if fields.get(self.key) != [] else None
        if listed is not None:
            for flag in listed:
                if isinstance(flag, bool) or not isinstance(flag, int | float) or flag < 0:
                    must = "each must be a number: 0 where the layer does not rotate"
                    raise fields.error(self.key, must, shown(flag), "Write 1 where it rotates.")
            origins["layer_types"] = f"{self.key}: 0 does not rotate"
            return [ALL if flag else NO_ROPE for flag in listed]
        return self.without_list(fields, count, origins)

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """The kinds where the config has no list."""
        if not self.interval_key:
            raise fields.error(self.key, "it must be given, since some layers do not rotate", "none", "Add it.")
        stated = fields.has(self.interval_key)
        n = fields.size(self.interval_key) if stated else self.interval
        origins["layer_types"] = f"{self.interval_key if stated else 'implied'}: every {n}. layer does not rotate"
        return [NO_ROPE if (i + 1) % n == 0 else ALL for i in range(count)]


@dataclass(frozen=True)
class Indices:
    """A list with the numbers of the layers that are `hit`; without it, none is, or all are, or it is not known."""

    key: str
    hit: str = ALL
    miss: str = NO_ROPE
    without: str | None = "miss"
    decides: bool = True

    def keys(self) -> set[str]:
        """The keys that it may ask for."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """The kind of each layer."""
        if not fields.has(self.key) and self.without != "miss":
            return None if self.without is None else [self.hit] * count
        listed = fields.get(self.key) or []
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
            must = f"it must be a list of layer numbers below {count}"
            raise fields.error(self.key, must, shown(listed), "Is it the list of another model?")
        does = {NO_ROPE: "do not rotate", ALL: "rotate"}.get(self.hit, f"are {self.hit}")
        chosen = set(listed)
        origins["layer_types"] = f"{self.key}: the layers that {does}"
        return [self.hit if i in chosen else self.miss for i in range(count)]


@dataclass(frozen=True)
class Coded:
    """A list with a number for each layer that stands for its kind."""

    key: str
    names: Mapping[int, str]
    decides: bool = False

    def keys(self) -> set[str]:
        """The keys that it may ask for."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """The kind of each layer; None where the list is not given."""
        if not fields.has(self.key):
            return None
        listed = fields.listed(self.key, count) or []
        for code in listed:
            if type(code) is not int or code not in self.names:
                known = ", ".join(str(code) for code in self.names)
                raise fields.error(self.key, f"each must be one of {known}", shown(code), "No other kind is known.")
        origins["layer_types"] = self.key
        return [self.names[code] for code in listed]


@dataclass(frozen=True)
class Named:
    """The list of kinds, under another key than `layer_types`."""

    key: str
    known: tuple[str, ...]
    decides: bool = True

    def keys(self) -> set[str]:
        """The keys that it may ask for."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """The kind of each layer."""
        found = listed(fields, self.key, dict.fromkeys(self.known), count, origins)
        if found is None:
            cure = "Add a list with one entry a layer."
            raise fields.error(self.key, "it must be given, since the layers differ", "none", cure)
        return found


def listed(
    fields: Fields, key: str, known: Mapping[str, object], count: int, origins: dict[str, str]
) -> list[str] | None:
    """The kinds by a list of their names under `key`; None where it is not given."""
    names = fields.listed(key, count)
    return None if names is None else named(fields, key, names, known, origins)


def named(
    fields: Fields, key: str, names: Sequence[object], known: Mapping[str, object], origins: dict[str, str]
) -> list[str]:
    """A list of kinds, each of which must be known."""
    for kind in names:
        if not isinstance(kind, str) or kind not in known:
            must = f"each must be one of {', '.join(known)}"
            raise fields.error(key, must, shown(kind), "No other kind of layer is known for this model_type.")
    origins["layer_types"] = key
    return [str(kind) for kind in names]
