"""Patterns that assign kinds to layers. A pattern that only one model uses is in the file of its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk._checks import shown
from ropewalk.configs.fields import Fields

ALL = "all"
NO_ROPE = "no rope"


class Pattern(Protocol):
    """Assigns a kind to each layer."""

    @property
    def decides(self) -> bool:
        """Whether the pattern takes precedence over `layer_types`. If not, it applies only if those are missing."""

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each of `count` layers, or None if the config does not define them."""

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""


@dataclass(frozen=True)
class Every:
    """One of every n layers (the last, or the first) is `kind`, and the others are `rest`. A key may override n."""

    n: int
    kind: str
    rest: str
    key: str = ""
    first: bool = False
    decides: bool = False

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kind of each layer."""
        stated = bool(self.key) and fields.has(self.key)
        n = fields.size(self.key) if stated else self.n
        which = "first" if self.first else "last"
        origins["layer_types"] = f"{self.key if stated else 'implied'}: the {which} of every {n} is {self.kind}"
        at = 0 if self.first else n - 1
        return [self.kind if i % n == at else self.rest for i in range(count)]


@dataclass(frozen=True)
class NoRopeLayers:
    """A list with an entry of 0 for each layer that does not rotate.

    Without the list, every interval-th layer does not rotate. Without `interval_key`, the list is required.
    """

    key: str = "no_rope_layers"
    interval_key: str = "no_rope_layer_interval"
    interval: int = 4
    decides: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key, self.interval_key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kind of each layer."""
        listed = fields.listed(self.key, count) if fields.get(self.key) != [] else None
        if listed is not None:
            for flag in listed:
                if isinstance(flag, bool) or not isinstance(flag, int | float) or flag < 0:
                    must = "must contain only numbers of at least 0"
                    raise fields.error(self.key, must, shown(flag), "Write 1 if a layer rotates and 0 if not.")
            origins["layer_types"] = f"{self.key}: 0 does not rotate"
            return [ALL if flag else NO_ROPE for flag in listed]
        return self.without_list(fields, count, origins)

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kinds if the config has no list."""
        if not self.interval_key:
            raise fields.error(self.key, "must be given, since some layers do not rotate", "none", "Add it.")
        stated = fields.has(self.interval_key)
        n = fields.size(self.interval_key) if stated else self.interval
        origins["layer_types"] = (
            f"{self.interval_key if stated else 'implied'}: one of every {n} layers does not rotate"
        )
        return [NO_ROPE if (i + 1) % n == 0 else ALL for i in range(count)]


@dataclass(frozen=True)
class Indices:
    """A list of the numbers of the layers that are `kind`. The other layers are `rest`.

    `without` says what holds if the list is missing: "kind" or "rest" for all layers, or None if it is not known.
    """

    key: str
    kind: str = ALL
    rest: str = NO_ROPE
    without: str | None = "rest"
    decides: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each layer."""
        if not fields.has(self.key) and self.without != "rest":
            return None if self.without is None else [self.kind] * count
        listed = fields.get(self.key) or []
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
            must = f"must be a list of layer numbers below {count}"
            raise fields.error(self.key, must, shown(listed), "Check that it is the list of this model.")
        does = {NO_ROPE: "do not rotate", ALL: "rotate"}.get(self.kind, f"are {self.kind}")
        chosen = set(listed)
        origins["layer_types"] = f"{self.key}: the layers that {does}"
        return [self.kind if i in chosen else self.rest for i in range(count)]


@dataclass(frozen=True)
class Coded:
    """A list with a number for each layer that encodes its kind."""

    key: str
    names: Mapping[int, str]
    decides: bool = False

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each layer, or None if the list is missing."""
        if not fields.has(self.key):
            return None
        listed = fields.listed(self.key, count) or []
        for code in listed:
            if type(code) is not int or code not in self.names:
                known = ", ".join(str(code) for code in self.names)
                must = f"must contain only {known}"
                raise fields.error(self.key, must, shown(code), "ropewalk knows no other kind of layer.")
        origins["layer_types"] = self.key
        return [self.names[code] for code in listed]


@dataclass(frozen=True)
class Named:
    """A list of kinds under another key than `layer_types`."""

    key: str
    known: tuple[str, ...]
    decides: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kind of each layer."""
        found = read_kinds(fields, self.key, dict.fromkeys(self.known), count, origins)
        if found is None:
            cure = "Add a list with one entry for each layer."
            raise fields.error(self.key, "must be given, since the layers differ", "none", cure)
        return found


def read_kinds(
    fields: Fields, key: str, known: Mapping[str, object], count: int, origins: dict[str, str]
) -> list[str] | None:
    """Return the kinds from a list of their names under `key`, or None if the list is missing."""
    names = fields.listed(key, count)
    return None if names is None else check_kinds(fields, key, names, known, origins)


def check_kinds(
    fields: Fields, key: str, names: Sequence[object], known: Mapping[str, object], origins: dict[str, str]
) -> list[str]:
    """Return a list of kinds, each of which must be in `known`."""
    for kind in names:
        if not isinstance(kind, str) or kind not in known:
            must = f"must contain only {', '.join(known)}"
            raise fields.error(key, must, shown(kind), "ropewalk knows no other kind of layer of this model_type.")
    origins["layer_types"] = key
    return [str(kind) for kind in names]
