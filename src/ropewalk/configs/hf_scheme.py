"""The scheme that collected rope keys describe: the signature of each scheme is its schema."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from ropewalk._checks import RopeError, nearest, shown, within
from ropewalk.configs import axes_rules
from ropewalk.configs.fields import Fields, Given
from ropewalk.schemes import SCHEMES, Scaling, build

SHARED = ("rope_type", "rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that every scheme may have beside it."""


def read(
    fields: Fields,
    given: dict[str, Given],
    longest: int | None,
    origins: dict[str, str],
    warnings: list[str],
    beside: frozenset[str],
) -> Scaling | None:
    """The scheme, None for the default.

    Args:
        fields: the config, for messages.
        given: what it says of these layers.
        longest: its max_position_embeddings.
        origins, warnings: what there is to say, added to.
        beside: keys of sections that say something else, and that somebody else reads.
    """
    rope_type = given.get("rope_type", Given("default", "rope_type"))
    name = rope_type.value
    if name != "default" and (not isinstance(name, str) or name not in SCHEMES):
        raise fields.error(
            rope_type.where,
            f"it must be one of default, {', '.join(SCHEMES)}",
            shown(rope_type.value),
            f"No other scheme is known.{nearest(name, SCHEMES) if isinstance(name, str) else ''}",
        )
    origins["scaling"] = rope_type.where if "rope_type" in given else "no rope_type is given"
    scheme = None if name == "default" else SCHEMES[name].meant(given.keys())
    parameters = _parameters(fields, given, str(name), scheme, warnings, beside)
    if scheme is None:
        return None
    values = {key: g.value for key, g in parameters.items()}
    origins.update({key: g.where for key, g in parameters.items()})
    for key, (value, where) in scheme.implied(values, longest).items():
        values[key], origins[key] = value, where
    _refuse_missing(fields, str(name), scheme, values)
    try:
        return build(scheme, values)
    except RopeError as e:
        sections = sorted({g.where.split(".")[0] for g in parameters.values()}) or ["rope_parameters"]
        raise within(f"{fields.source}: {' and '.join(sections)}", e) from None


def _parameters(
    fields: Fields,
    given: dict[str, Given],
    name: str,
    scheme: type[Scaling] | None,
    warnings: list[str],
    beside: frozenset[str],
) -> dict[str, Given]:
    """The keys that the scheme reads; any other is an error."""
    known = {f.name for f in dataclasses.fields(cast(Any, scheme))} if scheme is not None else set()
    idle = {} if scheme is None else scheme.idle
    parameters = {}
    for key, g in given.items():
        at_top = "." not in g.where
        if key in known:
            parameters[key] = g
        elif key in SHARED or at_top or not g.own or key in beside:
            continue
        elif key in idle:
            warnings.append(f"{g.where} has no effect: it {idle[key]}.")
        elif key in axes_rules.KEYS:
            must = "tokens of this model_type must have one position each, as ropewalk reads it"
            cure = (
                "The key shares the pairs out over several: build Rope(..., axes=Axes.sections(...)) by hand, or "
                "Axes.interleaved(...) where they stand in turn. If you run text alone, pass "
                f"ignore=({fields.path + g.where!r},)."
            )
            raise fields.error(g.where, must, shown(g.value), cure)
        else:
            missing = "" if "rope_type" in given else " Is rope_type missing?"
            raise fields.error(
                g.where,
                f"rope_type {name!r} must not have keys that it does not read",
                shown(g.value),
                f"It would have no effect.{missing}{nearest(key, [*sorted(known), *SHARED])} If the model's own code "
                f"does not read it either, pass ignore=({fields.path + g.where!r},).",
            )
    return parameters


def _refuse_missing(fields: Fields, name: str, scheme: type[Scaling], values: dict[str, Any]) -> None:
    for f in dataclasses.fields(cast(Any, scheme)):
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.name not in values and needed:
            raise fields.error(
                f"rope_type {name!r}",
                f"{f.name} must be given",
                "none",
                "Add it: engines differ in what they would put there.",
            )
