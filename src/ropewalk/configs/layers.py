"""Which layer is of which kind."""

from __future__ import annotations

from ropewalk._checks import shown
from ropewalk.configs.architecture import (
    ALL,
    NO_ROPE,
    Architecture,
    Coded,
    DensePrefix,
    Every,
    Indices,
    NoRopeLayers,
    Repeated,
)
from ropewalk.configs.fields import Fields


def kinds_of_layers(fields: Fields, architecture: Architecture, origins: dict[str, str]) -> list[str]:
    """The kind of each layer: a name of `architecture.kinds`, or `NO_ROPE`."""
    count = fields.layers(architecture.layers) * architecture.attentions
    origins["layers"] = fields.first(architecture.layers)
    if architecture.switch is not None:
        key, values = architecture.switch
        if fields.get(key) not in values:
            origins["layer_types"] = f"{key} is {shown(fields.get(key))}, so nothing rotates"
            return [NO_ROPE] * count
    if architecture.null_window and fields.is_null("sliding_window"):
        all_or_none = "nothing rotates" if architecture.null_window == NO_ROPE else "every layer rotates"
        origins["layer_types"] = f"sliding_window is null, so {all_or_none}"
        return [architecture.null_window] * count
    if architecture.null_base and fields.is_null("rope_theta", "rope_parameters.rope_theta"):
        origins["layer_types"] = "rope_theta is null, so nothing rotates"
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
    elif isinstance(architecture.pattern, DensePrefix):
        return _dense_prefix(fields, architecture.pattern, count, origins)
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
    if isinstance(architecture.pattern, Coded) and fields.has(architecture.pattern.key):
        return _coded(fields, architecture.pattern, count, origins)
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
    if pattern.all_without and not fields.has(pattern.key):
        return [pattern.hit] * count
    listed = fields.get(pattern.key) or []
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        must = f"it must be a list of layer numbers below {count}"
        raise fields.error(pattern.key, must, shown(listed), "Mend it.")
    does = {NO_ROPE: "do not rotate", ALL: "rotate"}.get(pattern.hit, f"are {pattern.hit}")
    chosen = set(listed)
    origins["layer_types"] = f"{pattern.key}: the layers that {does}"
    return [pattern.hit if i in chosen else pattern.miss for i in range(count)]


def _coded(fields: Fields, pattern: Coded, count: int, origins: dict[str, str]) -> list[str]:
    listed = fields.listed(pattern.key, count) or []
    for code in listed:
        if type(code) is not int or code not in pattern.names:
            known = ", ".join(str(code) for code in pattern.names)
            raise fields.error(pattern.key, f"each must be one of {known}", shown(code), "Mend it.")
    origins["layer_types"] = pattern.key
    return [pattern.names[code] for code in listed]


def _dense_prefix(fields: Fields, pattern: DensePrefix, count: int, origins: dict[str, str]) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    own = fields.size("prefix_dense_sliding_window_pattern") if fields.has("prefix_dense_sliding_window_pattern") else 1
    rest = fields.size("sliding_window_pattern") if fields.has("sliding_window_pattern") else 4
    first = fields.count("first_k_dense_replace", at_most=count)
    listed = fields.listed("layer_types", count)
    origins["layer_types"] = "layer_types" if listed else f"the first {first}: every {own}., then every {rest}. is full"
    if listed is None:
        listed = [full if (i + 1) % own == 0 else sliding for i in range(first)]
        listed += [full if (i + 1) % rest == 0 else sliding for i in range(count - first)]
    dense = fields.listed("mlp_layer_types", count) or ["dense"] * first + ["sparse"] * (count - first)
    for key, known, entries in (
        ("layer_types", (sliding, full), listed),
        ("mlp_layer_types", ("dense", "sparse"), dense),
    ):
        for entry in entries:
            if entry not in known:
                raise fields.error(key, f"each must be one of {', '.join(known)}", shown(entry), "Mend it.")
    turns = own == 1  # a prefix with a pattern of its own turns nothing but its sliding layers
    return [
        pattern.dense_full if turns and kind == full and mlp == "dense" else kind
        for kind, mlp in zip(listed, dense, strict=True)
    ]
