"""The scheme that collected rope keys describe: the signature of each scheme is its schema."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from ropewalk._checks import RopeError, nearest, shown
from ropewalk.configs.fields import Fields
from ropewalk.configs.rope_keys import SHARED, Given
from ropewalk.schemes import NTK, SCHEMES, Linear, Scheme, YaRN

_SECTION_KEYS = ("mrope_section", "mrope_interleaved", "interleaved")
# Written by some files, with no effect on the angles: (rope_type, key) → what it is.
_IDLE = {
    ("yarn", "finetuned"): "records that the weights were fine-tuned",
    ("yarn", "llama_4_scaling_beta"): "",  # read elsewhere: query_scale
    ("default", "llama_4_scaling_beta"): "",
    ("yarn", "max_position_embeddings"): "repeats the length of the model",
}
_OF_ALPHA = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")


def read_scheme(
    fields: Fields,
    given: dict[str, Given],
    longest: int | None,
    origins: dict[str, str],
    warnings: list[str],
    several_axes: bool,
) -> Scheme | None:
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
    scheme: type[Scheme] | None = None if name == "default" else SCHEMES[name]
    if name == "dynamic" and "alpha" in given:
        scheme, name = NTK, "dynamic with alpha"
    parameters = _parameters(fields, given, str(name), scheme, warnings, several_axes)
    if scheme is None:
        return None
    values = {key: g.value for key, g in parameters.items()}
    origins.update({key: g.where for key, g in parameters.items()})
    _fill_in(name, values, longest, origins)
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
    scheme: type[Scheme] | None,
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
        idle = (name, key) in _IDLE or (scheme is NTK and key in _OF_ALPHA)
        if key in SHARED or at_top or (several_axes and key in _SECTION_KEYS):
            continue
        if not idle:
            missing = "" if "rope_type" in given else " Is rope_type missing?"
            raise fields.error(
                g.where,
                f"rope_type {name!r} must not have keys that it does not read",
                shown(g.value),
                f"It would have no effect.{missing}{nearest(key, [*sorted(known), *SHARED])} Mend or remove it.",
            )
        if _IDLE.get((name, key), "is not read where alpha is given"):
            what = _IDLE.get((name, key), "is not read where alpha is given")
            warnings.append(f"{g.where} has no effect: it {what}.")
    return parameters


def _fill_in(name: object, values: dict[str, Any], longest: int | None, origins: dict[str, str]) -> None:
    """What the deployed code takes from elsewhere in the config."""
    if name == "dynamic" and longest is not None and "max_position_embeddings" not in values:
        values["max_position_embeddings"] = longest
        origins["max_position_embeddings"] = "max_position_embeddings"
    trained = values.get("original_max_position_embeddings")
    if (
        name == "longrope"
        and "factor" not in values
        and longest is not None
        and isinstance(trained, int)
        and 0 < trained <= longest
    ):
        values["factor"] = longest / trained
        origins["factor"] = "max_position_embeddings / original_max_position_embeddings"


def _refuse_missing(fields: Fields, name: str, scheme: type[Scheme], values: dict[str, Any]) -> None:
    for f in dataclasses.fields(cast(Any, scheme)):
        if f.name not in values and f.default is dataclasses.MISSING:
            raise fields.error(
                f"rope_type {name!r}",
                f"{f.name} must be given",
                "none",
                "Add it: engines differ in what they would put there.",
            )


def softmax_factor(scheme: Scheme | None) -> float:
    """m(mscale_all_dim)², by which DeepSeek's attention multiplies its softmax scale; 1 without a scaling."""
    if not isinstance(scheme, YaRN) or not scheme.mscale_all_dim:
        return 1.0
    m = 0.1 * scheme.mscale_all_dim * math.log(scheme.factor) + 1.0
    return m * m


def scheme_warnings(scheme: Scheme | None, longest: int | None) -> list[str]:
    """What a reader should know about a scheme and the length of its model."""
    if isinstance(scheme, Linear):
        return ["the file does not say on which length the model was trained: max_position_embeddings may be either."]
    if scheme is not None and scheme.rope_type == "longrope":
        length = cast(Any, scheme).original_max_position_embeddings
        return [
            f"two sets of frequencies: the long ones beyond {length} tokens. Engines differ in when; say at_length(n)."
        ]
    if scheme is not None and scheme.rope_type == "dynamic":
        return [
            "the frequencies grow slower with the length: engines differ in which length they take; say at_length(n)."
        ]
    return _yarn_warnings(scheme, longest) if isinstance(scheme, YaRN) else []


def _yarn_warnings(scheme: YaRN, longest: int | None) -> list[str]:
    warnings = []
    trained, scaled = scheme.original_max_position_embeddings, scheme.original_max_position_embeddings * scheme.factor
    if longest not in (None, trained, scaled):
        warnings.append(
            f"max_position_embeddings is {longest}, neither original_max_position_embeddings {trained} nor that times "
            f"factor, {scaled:.0f}; the factor decides the angles."
        )
    if scheme.mscale is None and scheme.mscale_all_dim is None:
        return warnings
    if scheme.attention_factor is not None:
        warnings.append("attention_factor is given, so mscale and mscale_all_dim do not change cos and sin.")
    elif not (scheme.mscale and scheme.mscale_all_dim):
        warnings.append("mscale and mscale_all_dim count only together; SGLang and mlx-lm use one alone.")
    elif scheme.mscale == scheme.mscale_all_dim:
        warnings.append("mscale and mscale_all_dim are equal, so the attention factor is 1; llama.cpp may differ.")
    return warnings
