"""Compare the rotation of two configs, and decide whether the weights and KV cache of the first fit the second."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from ropewalk import _checks
from ropewalk.configs import meta, source
from ropewalk.configs.model_ropes import ModelRopes, indices_of
from ropewalk.configs.read import read_config
from ropewalk.rope.rope import Rope
from ropewalk.tools.diff.lengths import longest_of
from ropewalk.tools.diff.rope_difference import FLOAT32, LAST_BITS, compare_ropes, farthest
from ropewalk.tools.diff.text import Result, configs_text

_CHANNELS = ("head_dim", "rotary_dim", "rotary_offset")


class ConfigDiff(Result):
    """The differences between the rotations of two configs. `facts` is all of it as a dict of JSON values."""

    @property
    def same(self) -> bool:
        """Whether both configs describe the same rotation, even with different keys. No if a key was ignored."""
        return bool(self.facts["same"])

    def text(self) -> str:
        """Return the comparison as text for a terminal."""
        return configs_text(self.facts)


def configs(
    first: Any,
    second: Any,
    *,
    length: int | None = None,
    pairing: str | None = None,
    base: float | None = None,
    factor: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> ConfigDiff:
    """Compare the rotation of two configs, such as those of a base model and its fine-tune.

    The meaning of the keys is compared, not their names, so two configs with different schemas can be the same. So can
    a config and the GGUF file or params.json of the same model: neither the permutation of q and k, which a converter
    between these formats does, nor the rounding of numbers to float32 counts as a difference.

    Args:
        first, second: as in `from_config`, including GGUF files and Meta's params.json.
        length: as in `diff.engines`.
        pairing, base, download: as in `from_config`, for both configs.
        factor: as in `from_config`, for each params.json whose rope is scaled.
        ignore: keys to ignore in each config that has them. As others were compared, `facts["same"]` is then None.

    Returns:
        A `ConfigDiff`, with the result as text (`.text()`) and as data (`.facts`). `facts["weights"]["fit"]` says
        whether weights that were trained with the first config can be loaded unchanged with the second.
        `facts["kv_cache"]["fit"]` says whether keys that were cached with the first config can be read with the second.

    Raises:
        RopeError: a config cannot be read or describes only a vision tower, a key to ignore is in neither config, or
            `length` is None and neither config states a length.
    """
    a, b = _read_both((first, second), factor, ignore, pairing=pairing, base=base, download=download)
    longest = longest_of("diff.configs", length, a, b)
    converted = a.file_format != b.file_format
    rows = _compare_all(a, b, longest, converted)
    other_differences = [
        {"what": name, "first": get(a), "second": get(b)} for name, get in _OTHER_PROPERTIES.items() if get(a) != get(b)
    ]
    facts: dict[str, Any] = {
        "first": _summary(a),
        "second": _summary(b),
        "length": longest,
        "layers": rows,
        "layer_counts": [len(a.layers), len(b.layers)],
        "beside": other_differences,
        "weights": _judge_weights(a, b, rows, converted),
        "kv_cache": _judge_kv_cache(a, b, rows),
        "ignored": list(ignore),
        "same": None if ignore else len(a.layers) == len(b.layers) and not rows and not other_differences,
    }
    return ConfigDiff(facts)


def _read_both(
    both: tuple[Any, Any], factor: float | None, ignore: Collection[str], **reading: Any
) -> tuple[ModelRopes, ModelRopes]:
    """Read two configs. Arguments and errors are those of `configs`."""
    ignored, found = tuple(source.Request(ignore=ignore).ignore), []
    asked = [_asked_of(config, ignored, factor, reading["download"]) for config in both]
    for key in ignored:
        if not any(key in keys for keys, _ in asked):
            must, fix = "every key to ignore must be in one of the configs", "Do not pass it."
            raise _checks.error("diff.configs", must, _checks.shown(key), fix)
    if factor is not None and all(own is None for _, own in asked):
        must, fix = "factor requires Meta's params.json with use_scaled_rope", "Omit it."
        raise _checks.error("diff.configs", must, _checks.shown(factor), fix)
    for config, (keys, own) in zip(both, asked, strict=True):
        ropes = read_config(config, factor=own, ignore=keys, **reading)
        if not ropes.layers:
            fix = "Compare two text models."
            raise _checks.error(ropes.source, "the config must describe a text model", "only a vision tower", fix)
        found.append(ropes)
    return found[0], found[1]


def _asked_of(
    config: Any, ignore: tuple[str, ...], factor: float | None, download: bool
) -> tuple[tuple[str, ...], float | None]:
    """Return the keys to ignore that a config has and the factor if it needs one: `from_config` refuses others."""
    if source.gguf_path(config) is not None or not (ignore or factor is not None):
        return ignore, None  # the GGUF reader raises if the key is missing
    values, name = source.load(config, download=download)
    keys = []
    for key in ignore:
        with contextlib.suppress(_checks.RopeError):
            source.without_keys(values, (key,), name)
            keys.append(key)
    return tuple(keys), factor if source.is_params(values) and meta.needs_factor(values) else None


def _summary(ropes: ModelRopes) -> dict[str, Any]:
    return {
        "source": ropes.source,
        "model_type": ropes.model_type,
        "max_position_embeddings": ropes.max_position_embeddings,
        "trained_length": ropes.trained_length,
        "warnings": list(ropes.warnings),
    }


def _compare_all(a: ModelRopes, b: ModelRopes, longest: int, converted: bool) -> list[dict[str, Any]]:
    """Compare the ropes of all layers, without what a converter changes if one config was `converted`.

    Return a list with the facts about each distinct pair of ropes that differ, as in `ConfigDiff`.
    """
    spans = [(a.window(i), b.window(i)) for i in range(min(len(a.layers), len(b.layers)))]
    short = min(n for n in (a.trained_length, b.trained_length, longest) if n is not None)
    rows = []
    for (rope_a, rope_b, windows), layers in indices_of(zip(a.layers, b.layers, spans, strict=False)).items():
        if converted and rope_a and rope_b:
            rope_b = dataclasses.replace(rope_b, pairing=rope_a.pairing)
        tolerance = FLOAT32 if converted else LAST_BITS
        row = _compare_layers(rope_a, rope_b, sorted({short, longest}), tolerance, windows)
        if row is not None:
            rows.append({"layers": layers, **row})
    return rows


def _compare_layers(
    a: Rope | None, b: Rope | None, lengths: list[int], tolerance: float, windows: tuple[int | None, ...]
) -> dict[str, Any] | None:
    """Compare the ropes of two layers at some lengths. Return facts, or None if they are the same."""
    if a is None or b is None:
        if a is b:
            return None
        changed = [{"what": "rotates", "first": a is not None, "second": b is not None}]
        return {"changed": changed, "at": [], "same_channels": a is b}
    if a == b:
        return None
    changed = [
        {"what": name, "first": _fact(a, name), "second": _fact(b, name)}
        for name in (*_CHANNELS, "pairing", "base", "scaling", "axes")
        if _fact(a, name) != _fact(b, name)
    ]
    channels = all(getattr(a, name) == getattr(b, name) for name in _CHANNELS)
    if a.rotary_dim != b.rotary_dim or a.axes != b.axes:
        return {"changed": changed, "at": [], "same_channels": channels}
    at = [
        {"sequence": n, **compare_ropes(a.at_length(n), b.at_length(n), farthest(n, *windows), tolerance)}
        for n in lengths
    ]
    # Schemes that depend on the length can differ in between, even if both ends are the same.
    switch, other = (_switch(rope, lengths[0], lengths[-1]) for rope in (a, b))
    fixed = (a.is_static and b.is_static) or (switch is not None and switch == other)
    same = fixed and all(found["same"] for found in at)
    if same and channels and a.pairing == b.pairing:
        return None
    return {"changed": changed, "at": at, "same_channels": channels}


def _switch(rope: Rope, short: int, longest: int) -> int | None:
    """Return the length in tokens, from `short` up to `longest`, at which a rope changes once. None for other ropes."""
    trained = None if rope.scaling is None else rope.scaling.trained_length(None)
    if rope.is_static or trained is None or not short <= trained < longest:
        return None
    parts = ((1, trained), (trained + 1, longest))
    return trained if all(rope.at_length(first) == rope.at_length(last) for first, last in parts) else None


def _fact(rope: Rope, name: str) -> Any:
    value = getattr(rope, name)
    if name == "scaling":
        return {"rope_type": "default"} if value is None else value.facts()
    return repr(value) if name == "axes" and value is not None else value


_OTHER_PROPERTIES: dict[str, Callable[[ModelRopes], Any]] = {
    "softmax_factor": lambda ropes: ropes.softmax_factor,
    "query_scale": lambda ropes: None if ropes.query_scale is None else dataclasses.asdict(ropes.query_scale),
    "output_order": lambda ropes: ropes.output_order,
    "rotates_values": lambda ropes: ropes.rotates_values,
    "others": lambda ropes: {name: repr(rope) for name, rope in ropes.extra_ropes.items()},
    "vision": lambda ropes: None if ropes.vision is None else [repr(rope) for rope in ropes.vision.ropes],
}


def _pairings_differ(a: ModelRopes, b: ModelRopes) -> bool:
    return any(x and y and x.pairing != y.pairing for x, y in zip(a.layers, b.layers, strict=False))


def _judge_weights(a: ModelRopes, b: ModelRopes, rows: list[dict[str, Any]], converted: bool) -> dict[str, Any]:
    """Decide whether weights of the first config fit the second.

    In the result, "permute" is true if they do not fit unchanged but would fit if q and k were permuted.
    """
    changed = {change["what"] for row in rows for change in row["changed"]}
    fit = permute = False
    if len(a.layers) != len(b.layers):
        why = "the number of layers differs"
    elif "head_dim" in changed:
        why = "the head size differs"
    elif permute := _pairings_differ(a, b):
        why = "the pairings of these formats differ, and converters permute the weights"
        why = why if converted else "the pairings differ"
    elif fit := bool(changed & {"rotary_dim", "rotary_offset", "axes", "rotates"}):
        why = "other channels are rotated, which the model must have been trained for"
    elif fit := any(found["inv_freq"]["pairs_that_differ"] for row in rows for found in row["at"]):
        why = "the same channels are rotated, at other frequencies, which the model must have been trained for"
    else:
        fit, why = True, "of the rotation, only the attention factor differs" if rows else "the rotation is the same"
    return {"fit": fit, "permute": permute, "why": why}


def _judge_kv_cache(a: ModelRopes, b: ModelRopes, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide whether cached keys of the first config fit the second.

    In the result, "rescale" is the factor by which the keys would have to be multiplied to fit, or None.
    """
    if len(a.layers) != len(b.layers):
        why = "the number of layers differs"
    elif _pairings_differ(a, b) or a.output_order != b.output_order:
        why = "the channels of the stored keys are in another order"
    elif a.extra_ropes != b.extra_ropes:
        why = f"the keys of {' and '.join(sorted({*a.extra_ropes, *b.extra_ropes}))} were rotated by other angles"
    elif a.rotates_values != b.rotates_values:
        why = "only one of them rotates the values"
    elif not rows:
        fixed = all(rope is None or rope.is_static for rope in a.layers)
        same = "the keys are rotated identically"
        return {"fit": True, "rescale": None, "why": same if fixed else f"{same}, if both run at the same length"}
    elif (ratio := _factor_ratio(rows)) is not None:
        return {"fit": False, "rescale": ratio, "why": "of the rotation, only the attention factor differs"}
    else:
        why = "the stored keys were rotated by other angles"
    return {"fit": False, "rescale": None, "why": why}


def _factor_ratio(rows: list[dict[str, Any]]) -> float | None:
    """Return the ratio of the attention factors if it is the same in all layers and nothing else differs, else None."""
    at = [found for row in rows for found in row["at"]]
    if any(not row["at"] or not row["same_channels"] for row in rows):
        return None
    ratios = {found["attention_factor_ratio"] for found in at}
    frequencies = any(found["inv_freq"]["pairs_that_differ"] for found in at)
    return next(iter(ratios)) if len(ratios) == 1 and not frequencies else None
