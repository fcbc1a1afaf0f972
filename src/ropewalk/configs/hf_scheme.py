"""Build a scheme from the keys about rotation in a config. The dataclass fields of a scheme name the keys it reads."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from ropewalk._checks import RopeError, argument, nearest, shown, with_context
from ropewalk.configs import axes_rules
from ropewalk.configs.fields import ConfigValue, Fields
from ropewalk.schemes import SCHEMES, Scaling, build

SHARED = ("rope_type", "rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that are allowed with every scheme."""


def read(
    fields: Fields,
    rope_keys: dict[str, ConfigValue],
    longest: int | None,
    origins: dict[str, str],
    warnings: list[str],
    other_keys: frozenset[str],
) -> Scaling | None:
    """Return the scheme of a kind of layer, or None for rope_type "default".

    Args:
        fields: the config, for messages.
        rope_keys: the keys that define the rope of this kind of layer.
        longest: max_position_embeddings, in tokens, or None.
        origins: extended by the key that each parameter came from.
        warnings: extended by a sentence for each key without an effect.
        other_keys: keys of `rope_scaling` and `rope_parameters` that are not parameters of a scheme.

    Raises:
        RopeError: the scheme is unknown, a parameter is missing or invalid, or the scheme does not read a key.
    """
    rope_type = rope_keys.get("rope_type", ConfigValue("default", "rope_type"))
    name = rope_type.value
    if name != "default" and (not isinstance(name, str) or name not in SCHEMES):
        raise fields.error(
            rope_type.where,
            f"must be one of default, {', '.join(SCHEMES)}",
            shown(rope_type.value),
            f"ropewalk knows no other scheme.{nearest(name, SCHEMES) if isinstance(name, str) else ''}",
        )
    origins["scaling"] = rope_type.where if "rope_type" in rope_keys else "no rope_type is given"
    scheme = None if name == "default" else SCHEMES[name].class_for_keys(rope_keys.keys())
    parameters = _parameters(fields, rope_keys, str(name), scheme, warnings, other_keys)
    if scheme is None:
        return None
    values = {key: entry.value for key, entry in parameters.items()}
    origins.update({key: entry.where for key, entry in parameters.items()})
    for key, (value, where) in scheme.derived_fields(values, longest).items():
        values[key], origins[key] = value, where
    _refuse_missing(fields, str(name), scheme, values)
    try:
        return build(scheme, values)
    except RopeError as e:
        sections = sorted({entry.where.split(".")[0] for entry in parameters.values()}) or ["rope_parameters"]
        raise with_context(f"{fields.source}: {' and '.join(sections)}", e) from None


def _parameters(
    fields: Fields,
    rope_keys: dict[str, ConfigValue],
    name: str,
    scheme: type[Scaling] | None,
    warnings: list[str],
    other_keys: frozenset[str],
) -> dict[str, ConfigValue]:
    """Return the entries of `rope_keys` that the scheme reads. Add a warning for each key without an effect.

    Raises:
        RopeError: a key of `rope_scaling` or `rope_parameters` has no known meaning.
    """
    known = {f.name for f in dataclasses.fields(cast(Any, scheme))} if scheme is not None else set()
    without_effect = {} if scheme is None else scheme.keys_without_effect
    parameters = {}
    for key, entry in rope_keys.items():
        at_top = "." not in entry.where
        if key in known:
            parameters[key] = entry
        elif key in SHARED or at_top or not entry.own or key in other_keys:
            continue
        elif key in without_effect:
            warnings.append(f"{entry.where} has no effect: it {without_effect[key]}.")
        elif key in axes_rules.KEYS:
            must = "must not be given, since ropewalk knows this model_type with one position for each token"
            fix = (
                "The key assigns the pairs to several axes: build Rope(..., axes=Axes.sections(...)) by hand, or use "
                "Axes.interleaved(...) if axes alternate. For text alone, "
                f"pass {argument('ignore', (fields.path + entry.where,))}."
            )
            raise fields.error(entry.where, must, shown(entry.value), fix)
        else:
            missing = "" if "rope_type" in rope_keys else " Check whether rope_type is missing."
            raise fields.unread(
                entry.where,
                f"must be a key that rope_type {name!r} reads",
                shown(entry.value),
                f"It would have no effect.{missing}{nearest(key, [*sorted(known), *SHARED])} If the model's own code "
                f"does not read it either, pass {argument('ignore', (fields.path + entry.where,))}.",
            )
    return parameters


def _refuse_missing(fields: Fields, name: str, scheme: type[Scaling], values: dict[str, Any]) -> None:
    for f in dataclasses.fields(cast(Any, scheme)):
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.name not in values and needed:
            fix = "Add it, since engines differ in its default."
            raise fields.error(f.name, f"must be given for rope_type {name!r}", "none", fix)
