"""Which layer is of which kind."""

from __future__ import annotations

from ropewalk._checks import shown
from ropewalk.configs.architecture import ALL, Architecture, Every, Indices, NoRopeLayers, Repeated
from ropewalk.configs.fields import Fields

NO_ROPE = "no rope"


def kinds_of_layers(fields: Fields, architecture: Architecture, origins: dict[str, str]) -> list[str]:
    """The kind of each layer: a name of `architecture.kinds`, or `NO_ROPE`."""
    count = fields.layers(architecture.layers)
    origins["layers"] = fields.first(architecture.layers)
    if architecture.switch is not None:
        key, values = architecture.switch
        if fields.get(key) not in values:
            origins["layer_types"] = f"{key} is {shown(fields.get(key))}, so nothing rotates"
            return [NO_ROPE] * count
    if isinstance(architecture.pattern, Indices):
        return _indices(fields, architecture.pattern, count, origins)
    if isinstance(architecture.pattern, NoRopeLayers):
        return _no_rope_layers(fields, architecture.pattern, count, origins)
    if set(architecture.kinds) == {ALL}:
        return [ALL] * count
    if isinstance(architecture.pattern, Repeated):
        key = architecture.pattern.key
        listed = fields.get(key)
        if not isinstance(listed, list) or not listed:
            raise fields.error(key, "it must be a list of kinds of layers", shown(listed), "Add it.")
        listed = [listed[i % len(listed)] for i in range(count)]
    else:
        key = architecture.layer_types_key
        listed = fields.listed(key, count)
    if listed is not None:
        for kind in listed:
            if not isinstance(kind, str) or kind not in architecture.kinds:
                known = ", ".join(architecture.kinds)
                raise fields.error(key, f"each must be one of {known}", shown(kind), "Mend it.")
        origins["layer_types"] = key
        return [str(kind) for kind in listed]
    if not isinstance(architecture.pattern, Every):
        raise fields.error(
            architecture.layer_types_key,
            "it must be given, since the layers differ",
            "none",
            "Add a list with one entry a layer.",
        )
    return every(fields, architecture.pattern, count, origins)


def every(fields: Fields, pattern: Every, count: int, origins: dict[str, str]) -> list[str]:
    """The kind of each layer where one of each n has one kind and the others another."""
    stated = bool(pattern.key) and fields.has(pattern.key)
    n = fields.size(pattern.key) if stated else pattern.n
    which = "first" if pattern.first else "last"
    origins["layer_types"] = f"{pattern.key if stated else 'implied'}: the {which} of every {n} is {pattern.hit}"
    at = 0 if pattern.first else n - 1
    return [pattern.hit if i % n == at else pattern.miss for i in range(count)]


def _no_rope_layers(fields: Fields, pattern: NoRopeLayers, count: int, origins: dict[str, str]) -> list[str]:
    listed = fields.listed(pattern.key, count) if fields.get(pattern.key) != [] else None
    if listed is not None:
        for flag in listed:
            if isinstance(flag, bool) or not isinstance(flag, int | float) or flag < 0:
                must = "each must be a number: 0 where the layer does not rotate"
                raise fields.error(pattern.key, must, shown(flag), "Mend it.")
        origins["layer_types"] = f"{pattern.key}: 0 does not rotate"
        return [ALL if flag else NO_ROPE for flag in listed]
    if not pattern.interval_key:
        if pattern.holds_base:
            return [ALL] * count  # the base is that of the model
        raise fields.error(pattern.key, "it must be given, since some layers do not rotate", "none", "Add it.")
    stated = fields.has(pattern.interval_key)
    n = fields.size(pattern.interval_key) if stated else pattern.interval
    origins["layer_types"] = f"{pattern.interval_key if stated else 'implied'}: every {n}. layer does not rotate"
    return [NO_ROPE if (i + 1) % n == 0 else ALL for i in range(count)]


def _indices(fields: Fields, pattern: Indices, count: int, origins: dict[str, str]) -> list[str]:
    listed = fields.get(pattern.key) or []
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        must = f"it must be a list of layer numbers below {count}"
        raise fields.error(pattern.key, must, shown(listed), "Mend it.")
    origins["layer_types"] = f"{pattern.key}: the layers that {'rotate' if pattern.rotate else 'do not'}"
    return [ALL if (i in set(listed)) == pattern.rotate else NO_ROPE for i in range(count)]
