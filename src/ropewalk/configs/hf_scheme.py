"""The scheme that collected rope keys describe: the signature of each scheme is its schema."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from ropewalk._checks import RopeError, nearest, shown
from ropewalk.configs.fields import Fields
from ropewalk.configs.rope_keys import SHARED, Given
from ropewalk.schemes import SCHEMES, Scaling

_SECTION_KEYS = ("mrope_section", "mrope_interleaved", "interleaved")
# Read elsewhere (query_scale); of no scheme.
_OF_THE_MODEL = ("llama_4_scaling_beta",)


def read_scheme(
    fields: Fields,
    given: dict[str, Given],
    longest: int | None,
    origins: dict[str, str],
    warnings: list[str],
    several_axes: bool,
) -> Scaling | None:
    """The scheme, None for the default; `longest` is max_position_embeddings."""
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
    parameters = _parameters(fields, given, str(name), scheme, warnings, several_axes)
    if scheme is None:
        return None
    values = {key: g.value for key, g in parameters.items()}
    origins.update({key: g.where for key, g in parameters.items()})
    for key, (value, where) in scheme.implied(values, longest).items():
        values[key], origins[key] = value, where
    _refuse_missing(fields, str(name), scheme, values)
    try:
        return scheme(**values)
    except RopeError as e:
        sections = sorted({g.where.split(".")[0] for g in parameters.values()}) or ["rope_parameters"]
        raise RopeError(f"{fields.source}: {' and '.join(sections)}: {e}") from None


def _parameters(
    fields: Fields,
    given: dict[str, Given],
    name: str,
    scheme: type[Scaling] | None,
    warnings: list[str],
    several_axes: bool,
) -> dict[str, Given]:
    """The keys that the scheme reads; any other is an error."""
    known = {f.name for f in dataclasses.fields(cast(Any, scheme))} if scheme is not None else set()
    parameters = {}
    for key, g in given.items():
        if key in known:
            parameters[key] = g
            continue
        at_top = "." not in g.where
        if key in SHARED or at_top or key in _OF_THE_MODEL or (several_axes and key in _SECTION_KEYS):
            continue
        idle = {} if scheme is None else scheme.idle
        if key not in idle:
            missing = "" if "rope_type" in given else " Is rope_type missing?"
            raise fields.error(
                g.where,
                f"rope_type {name!r} must not have keys that it does not read",
                shown(g.value),
                f"It would have no effect.{missing}{nearest(key, [*sorted(known), *SHARED])} Mend or remove it.",
            )
        warnings.append(f"{g.where} has no effect: it {idle[key]}.")
    return parameters


def _refuse_missing(fields: Fields, name: str, scheme: type[Scaling], values: dict[str, Any]) -> None:
    for f in dataclasses.fields(cast(Any, scheme)):
        if f.name not in values and f.default is dataclasses.MISSING:
            raise fields.error(
                f"rope_type {name!r}",
                f"{f.name} must be given",
                "none",
                "Add it: engines differ in what they would put there.",
            )
