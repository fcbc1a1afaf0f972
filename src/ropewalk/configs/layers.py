"""Patterns: rules that assign a kind, such as "sliding_attention", to each layer of a config.

All layers of a kind share one rope. A pattern that only one model uses is in the model's file in `families/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk._checks import shown
from ropewalk.configs.fields import Fields

ALL = "all"
"""The kind of all layers that rotate, in a model that has only one such kind."""
NO_ROPE = "no rope"
"""The kind of layers that do not rotate, in a model whose configs have no other name for it."""


class Pattern(Protocol):
    """The interface of a rule that assigns a kind to each layer."""

    @property
    def overrides_layer_types(self) -> bool:
        """Whether the pattern applies even if the config has `layer_types`."""

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each of `count` layers, or None if the config does not define the kinds."""

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""


@dataclass(frozen=True)
class Every:
    """A pattern that repeats every n layers: one layer is of kind `kind`, and the others are of kind `rest`.

    Args:
        n: the number of layers after which the pattern repeats.
        kind, rest: the kinds.
        key: config key that overrides n; "" if there is none.
        first: whether the first of every n layers is of kind `kind`. If False, it is the last.
        overrides_layer_types: as in `Pattern`.
    """

    n: int
    kind: str
    rest: str
    key: str = ""
    first: bool = False
    overrides_layer_types: bool = False

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kind of each of `count` layers, `kind` or `rest`."""
        has_key = bool(self.key) and fields.has(self.key)
        n = fields.size(self.key) if has_key else self.n
        which = "first" if self.first else "last"
        origins["layer_types"] = f"{self.key if has_key else 'implied'}: the {which} of every {n} is {self.kind}"
        at = 0 if self.first else n - 1
        return [self.kind if i % n == at else self.rest for i in range(count)]


@dataclass(frozen=True)
class NoRopeLayers:
    """A config key with a list that has an entry for each layer, which is 0 if the layer does not rotate.

    Args:
        key: key of the list.
        interval_key: key of the interval n that applies if the list is missing: the last of every n layers does not
            rotate. "" makes the list required.
        interval: the value of n if neither key has a value.
        overrides_layer_types: as in `Pattern`.
    """

    key: str = "no_rope_layers"
    interval_key: str = "no_rope_layer_interval"
    interval: int = 4
    overrides_layer_types: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key, self.interval_key} - {""}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return `ALL` for each layer that rotates, and `NO_ROPE` for each layer that does not."""
        flags = fields.layer_list(self.key, count) if fields.get(self.key) != [] else None
        if flags is not None:
            for flag in flags:
                if isinstance(flag, bool) or not isinstance(flag, int | float) or flag < 0:
                    must = "must contain only numbers of at least 0"
                    raise fields.error(self.key, must, shown(flag), "Write 1 if a layer rotates and 0 if not.")
            origins["layer_types"] = f"{self.key}: 0 does not rotate"
            return [ALL if flag else NO_ROPE for flag in flags]
        return self.without_list(fields, count, origins)

    def without_list(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kind of each layer of a config without the list."""
        if not self.interval_key:
            raise fields.error(self.key, "must be given, since some layers do not rotate", "none", "Add it.")
        has_key = fields.has(self.interval_key)
        n = fields.size(self.interval_key) if has_key else self.interval
        origins["layer_types"] = (
            f"{self.interval_key if has_key else 'implied'}: one of every {n} layers does not rotate"
        )
        return [NO_ROPE if (i + 1) % n == 0 else ALL for i in range(count)]


@dataclass(frozen=True)
class LayerIndices:
    """A config key with a list of the indices of the layers of kind `kind`. The other layers are of kind `rest`.

    Args:
        key: key of the list.
        kind, rest: the kinds.
        if_missing: the meaning of a missing list. With "kind" or "rest", all layers are of that kind. None means that
            the kinds are not known.
        overrides_layer_types: as in `Pattern`.
    """

    key: str
    kind: str = ALL
    rest: str = NO_ROPE
    if_missing: str | None = "rest"
    overrides_layer_types: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each of `count` layers, or None if the list is missing and `if_missing` is None."""
        if not fields.has(self.key) and self.if_missing != "rest":
            return None if self.if_missing is None else [self.kind] * count
        indices = fields.get(self.key) or []
        if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < count for i in indices):
            must = f"must be a list of layer numbers below {count}"
            raise fields.error(self.key, must, shown(indices), "Check that it is the list of this model.")
        does = {NO_ROPE: "do not rotate", ALL: "rotate"}.get(self.kind, f"are {self.kind}")
        chosen = set(indices)
        origins["layer_types"] = f"{self.key}: the layers that {does}"
        return [self.kind if i in chosen else self.rest for i in range(count)]


@dataclass(frozen=True)
class LayerCodes:
    """A config key with a list that has a number for each layer. `names` maps these numbers to kinds."""

    key: str
    names: Mapping[int, str]
    overrides_layer_types: bool = False

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str] | None:
        """Return the kind of each layer, or None if the list is missing."""
        if not fields.has(self.key):
            return None
        codes = fields.layer_list(self.key, count) or []
        for code in codes:
            if type(code) is not int or code not in self.names:
                known = ", ".join(str(code) for code in self.names)
                must = f"must contain only {known}"
                raise fields.error(self.key, must, shown(code), "ropewalk knows no other kind of layer.")
        origins["layer_types"] = self.key
        return [self.names[code] for code in codes]


@dataclass(frozen=True)
class LayerNames:
    """A config key that has the same meaning as `layer_types`: a list with the kind of each layer.

    Args:
        key: key of the list.
        known: the valid kinds.
        overrides_layer_types: as in `Pattern`.
    """

    key: str
    known: tuple[str, ...]
    overrides_layer_types: bool = True

    def keys(self) -> set[str]:
        """Return the keys that the pattern may read."""
        return {self.key}

    def kinds(self, fields: Fields, count: int, origins: dict[str, str]) -> list[str]:
        """Return the kinds in the list, one for each of `count` layers."""
        names = read_kinds(fields, self.key, dict.fromkeys(self.known), count, origins)
        if names is None:
            fix = "Add a list with one entry for each layer."
            raise fields.error(self.key, "must be given, since the layers differ", "none", fix)
        return names


def read_kinds(
    fields: Fields, key: str, known: Mapping[str, object], count: int, origins: dict[str, str]
) -> list[str] | None:
    """Return the value of `key` as a list with the kind of each layer, or None if it is missing.

    Raises:
        RopeError: the length of the list is not `count`, or a kind is not in `known`.
    """
    names = fields.layer_list(key, count)
    return None if names is None else check_kinds(fields, key, names, known, origins)


def check_kinds(
    fields: Fields, key: str, names: Sequence[object], known: Mapping[str, object], origins: dict[str, str]
) -> list[str]:
    """Return the names as a list of kinds, and record their key in `origins`.

    Raises:
        RopeError: a name is not in `known`.
    """
    for kind in names:
        if not isinstance(kind, str) or kind not in known:
            must = f"must contain only {', '.join(known)}"
            raise fields.error(key, must, shown(kind), "ropewalk knows no other kind of layer of this model_type.")
    origins["layer_types"] = key
    return [str(kind) for kind in names]
