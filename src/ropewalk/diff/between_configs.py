"""What changed between two configs, and whether weights and KV caches still fit: first as data, then in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk import _checks
from ropewalk.configs import source
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import from_config
from ropewalk.diff.apart import apart
from ropewalk.diff.words_of_configs import configs_text
from ropewalk.rope import Rope

_CHANNELS = ("head_dim", "rotary_dim", "rotary_offset")


@dataclass(frozen=True)
class ConfigDiff:
    """What changed from one config to another.

    Args:
        facts: everything, as plain data that is ready for JSON.
        ropes: for each row of `facts["layers"]`, the static ropes of both, "first" and "second", at `row["drawn_at"]`;
            empty where they rotate other channels.
    """

    facts: Mapping[str, Any]
    ropes: tuple[Mapping[str, Rope], ...] = dataclasses.field(repr=False)

    @property
    def same(self) -> bool:
        """Whether both mean the same rotation, whatever their keys are called."""
        return bool(self.facts["same"])

    def text(self) -> str:
        """In plain words."""
        return configs_text(self.facts)


def configs(
    first: Any,
    second: Any,
    *,
    length: int | None = None,
    pairing: str | None = None,
    base: float | None = None,
    ignore: Collection[str] = (),
    download: bool = False,
) -> ConfigDiff:
    """What changed from one config to another, as a fine-tune against its base, and what still fits.

    The keys are not compared, but what they mean: a config in another schema says the same.

    Args:
        first, second: as in `from_config`, also a GGUF file or Meta's params.json.
        length: the longest sequence compared, in tokens; None: the longer of what the configs say.
        pairing, base, download: as in `from_config`, for both.
        ignore: keys to read past, in whichever of the two has them.

    Returns:
        A `ConfigDiff`: `.text()` in plain words, `.facts` as data. `facts["weights"]["fit"]` says whether weights
        trained for the first can be loaded for the second as they are, `facts["kv_cache"]["fit"]` whether keys that
        were rotated for the first can be read by the second.

    Raises:
        RopeError: one of them cannot be read, is a vision tower alone, or the length must be said.
    """

    of_each = _keys_of_each((first, second), ignore, download)
    a, b = (
        _text(from_config(config, pairing=pairing, base=base, ignore=keys, download=download))
        for config, keys in zip((first, second), of_each, strict=True)
    )
    longest = _longest(a, b, length)
    rows, kept = _layers(a, b, longest)
    beside = _beside(a, b)
    facts: dict[str, Any] = {
        "first": _about(a),
        "second": _about(b),
        "length": longest,
        "layers": rows,
        "layer_counts": [len(a.layers), len(b.layers)],
        "beside": beside,
        "weights": _weights(a, b, rows),
        "kv_cache": _kv_cache(a, b, rows),
        "same": len(a.layers) == len(b.layers) and not rows and not beside,
    }
    return ConfigDiff(facts, tuple(kept))


def _keys_of_each(both: tuple[Any, Any], ignore: Collection[str], download: bool) -> list[Collection[str]]:
    """The keys to ignore that each of the two has, since `from_config` refuses one that is not there."""
    if not ignore or isinstance(ignore, str) or not all(isinstance(key, str) for key in ignore):
        return [ignore, ignore]  # from_config says what must hold
    found: list[Collection[str]] = [tuple(key for key in ignore if _has(config, key, download)) for config in both]
    for key in ignore:
        if key not in found[0] and key not in found[1]:
            must, cure = "every key to ignore must be in one of the configs", "Leave it out."
            raise _checks.error("diff.configs", must, _checks.shown(key), cure)
    return found


def _has(config: Any, key: str, download: bool) -> bool:
    if source.gguf_path(config) is not None:
        return True  # its reader says whether the key is there
    values, name = source.load(config, download=download)
    try:
        source.without(values, (key,), name)
    except _checks.RopeError:
        return False
    return True


def _text(ropes: ModelRopes) -> ModelRopes:
    if not ropes.layers:
        cure = "Compare two text models."
        raise _checks.error(ropes.source, "the config must be that of a text model", "a vision tower alone", cure)
    return ropes


def _longest(a: ModelRopes, b: ModelRopes, length: int | None) -> int:
    if length is not None:
        return _checks.length("diff.configs", "length", length)
    known = [n for ropes in (a, b) for n in (ropes.max_position_embeddings, ropes.trained_length) if n is not None]
    if not known:
        must, cure = "the length must be said, since neither config says it", "Pass length=N (--length N)."
        raise _checks.error("diff.configs", must, "none", cure)
    return max(known)


def _about(ropes: ModelRopes) -> dict[str, Any]:
    return {
        "source": ropes.source,
        "model_type": ropes.model_type,
        "max_position_embeddings": ropes.max_position_embeddings,
        "trained_length": ropes.trained_length,
        "warnings": list(ropes.warnings),
    }


def _layers(a: ModelRopes, b: ModelRopes, longest: int) -> tuple[list[dict[str, Any]], list[Mapping[str, Rope]]]:
    """A row for each distinct pair of ropes that differ, and their ropes where both have the same channels."""
    layers_of: dict[tuple[Rope | None, Rope | None], list[int]] = {}
    for index, both in enumerate(zip(a.layers, b.layers, strict=False)):
        layers_of.setdefault(both, []).append(index)
    short = min(n for n in (a.trained_length, b.trained_length, longest) if n is not None)
    rows, kept = [], []
    for (one, other), layers in layers_of.items():
        row, ropes = _row(one, other, sorted({short, longest}))
        if row is not None:
            rows.append({"layers": layers, **row})
            kept.append(ropes)
    return rows, kept


def _row(a: Rope | None, b: Rope | None, lengths: list[int]) -> tuple[dict[str, Any] | None, Mapping[str, Rope]]:
    if a is None or b is None:
        if a is b:
            return None, {}
        changed = [{"what": "rotates", "first": a is not None, "second": b is not None}]
        return {"changed": changed, "at": [], "same_channels": a is b}, {}
    if a == b:
        return None, {}
    changed = [
        {"what": name, "first": _said(a, name), "second": _said(b, name)}
        for name in (*_CHANNELS, "pairing", "base", "scaling", "axes")
        if _said(a, name) != _said(b, name)
    ]
    channels = all(getattr(a, name) == getattr(b, name) for name in _CHANNELS)
    if a.rotary_dim != b.rotary_dim or a.axes != b.axes:
        return {"changed": changed, "at": [], "same_channels": channels}, {}
    at = [{"sequence": n, **apart(a.at_length(n), b.at_length(n), n).facts()} for n in lengths]
    # A scheme whose lists switch within a length differs there, though both ends may be the same.
    same = all(found["same"] for found in at) and a.is_static and b.is_static
    if same and channels and a.pairing == b.pairing:
        return None, {}
    ropes = {"first": a.at_length(lengths[-1]), "second": b.at_length(lengths[-1])}
    return {"changed": changed, "at": at, "same_channels": channels, "drawn_at": lengths[-1]}, ropes


def _said(rope: Rope, name: str) -> Any:
    value = getattr(rope, name)
    if name == "scaling":
        return {"rope_type": "default"} if value is None else value.facts()
    return repr(value) if name == "axes" and value is not None else value


_BESIDE: dict[str, Callable[[ModelRopes], Any]] = {
    "softmax_factor": lambda ropes: ropes.softmax_factor,
    "query_scale": lambda ropes: None if ropes.query_scale is None else dataclasses.asdict(ropes.query_scale),
    "output_order": lambda ropes: ropes.output_order,
    "rotates_values": lambda ropes: ropes.rotates_values,
    "others": lambda ropes: {name: repr(rope) for name, rope in ropes.extra_ropes.items()},
    "vision": lambda ropes: None if ropes.vision is None else [repr(rope) for rope in ropes.vision.ropes],
}


def _beside(a: ModelRopes, b: ModelRopes) -> list[dict[str, Any]]:
    """What differs beside the rotation of text."""
    return [{"what": name, "first": get(a), "second": get(b)} for name, get in _BESIDE.items() if get(a) != get(b)]


def _weights(a: ModelRopes, b: ModelRopes, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether weights of the first can be loaded for the second; `permute` where q and k must be permuted first."""
    changed = {one["what"] for row in rows for one in row["changed"]}
    if len(a.layers) != len(b.layers):
        return {"fit": False, "permute": False, "why": "the numbers of layers differ"}
    if "head_dim" in changed:
        return {"fit": False, "permute": False, "why": "the sizes of a head differ"}
    if "pairing" in changed:
        return {"fit": False, "permute": True, "why": "the pairings differ"}
    if changed & {"rotary_dim", "rotary_offset", "axes", "rotates"}:
        return {"fit": True, "permute": False, "why": "other channels rotate, so the model must have been trained so"}
    if any(found["inv_freq"]["pairs_that_differ"] for row in rows for found in row["at"]):
        return {"fit": True, "permute": False, "why": "the channels are the same, and turn at other speeds"}
    if rows:
        return {"fit": True, "permute": False, "why": "only the attention factor differs"}
    return {"fit": True, "permute": False, "why": "the rotation is the same"}


def _kv_cache(a: ModelRopes, b: ModelRopes, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether keys that were rotated for the first can be read by the second; `rescale`: by what, where that is all."""
    changed = {one["what"] for row in rows for one in row["changed"]}
    if len(a.layers) != len(b.layers):
        why = "the numbers of layers differ"
    elif "pairing" in changed or a.output_order != b.output_order:
        why = "the channels of the stored keys are in another order"
    elif a.extra_ropes != b.extra_ropes:
        why = (
            f"the stored keys of {' and '.join(sorted({*a.extra_ropes, *b.extra_ropes}))} were rotated by other angles"
        )
    elif a.rotates_values != b.rotates_values:
        why = "one of them rotates the values, too"
    elif not rows:
        fixed = all(rope is None or rope.is_static for rope in a.layers)
        alike = "the keys are rotated alike"
        return {"fit": True, "rescale": None, "why": alike if fixed else f"{alike}, where both run at one length"}
    elif (ratio := _only_factor(rows)) is not None:
        return {"fit": False, "rescale": ratio, "why": "the attention factor differs, and no angle"}
    else:
        why = "the stored keys were rotated by other angles"
    return {"fit": False, "rescale": None, "why": why}


def _only_factor(rows: list[dict[str, Any]]) -> float | None:
    """The ratio of the attention factors, where nothing else differs and it is the same in all layers."""
    at = [found for row in rows for found in row["at"]]
    if any(not row["at"] or not row["same_channels"] for row in rows):
        return None
    ratios = {found["attention_factor_ratio"] for found in at}
    turning = any(found["inv_freq"]["pairs_that_differ"] for found in at)
    return next(iter(ratios)) if len(ratios) == 1 and not turning else None
