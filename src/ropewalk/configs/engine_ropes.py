"""Compute the ropes of a config as an inference engine does, by the rules in `ropewalk.engines`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import RopeError, error
from ropewalk.configs import hf, mistral, other_formats, source
from ropewalk.configs.hf import find_text
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES, name_of
from ropewalk.configs.reader import PAIRING_KEY, SECTIONS
from ropewalk.configs.source import Request
from ropewalk.configs.tables.gguf import HF_PUBLISHED_IN_5
from ropewalk.engines import ENGINE_KEYS, Answer, ConfigRope, Engine
from ropewalk.engines import engine as engine
from ropewalk.rope.rope import Rope

_MAX_DEPTH = 4
_HOW = {"read": "read, not run", "not recorded": "not recorded for this model"}
_LENGTH_NOTES = {
    "nothing": "",
    "the call": "It uses the length of the sequences in each call: pass that length to at_length.",
    "the setting": "It uses the length that was configured at startup: pass that length to at_length.",
}


def ropes_for_engines(
    config: Any, *chosen: Engine, **asked: Any
) -> tuple[ModelRopes, list[tuple[ConfigRope, list[int]]]]:
    """Read the text ropes of a config, and the config keys that the `chosen` engines read for each rope.

    A file of another format is read as the config.json of the same model, converted for transformers. The other
    arguments and the errors are those of `from_config`.

    Returns:
        The ropes of the config, and a list with one entry for each distinct rope: a `ConfigRope` for the rules in
        `engines`, and the indices of the layers that have this rope.
    """
    ropes, values = read(config, Request(**asked, text_only=True))
    return ropes, distinct_ropes(ropes, values, *chosen)


def read(config: Any, asked: Request) -> tuple[ModelRopes, dict[str, Any]]:
    """Read the ropes of a config without the keys that only engines read. Return them and the whole config.

    A file of another format is converted to a config.json.
    """
    values, name, is_other = source.load_any(config, asked)
    other, note = None, ""
    if is_other:
        other = other_formats.read(values, name, asked)
        inside = mistral.has_encoder(values)
        try:
            in_5 = other.query_scale or (other.config or {}).get("model_type") in HF_PUBLISHED_IN_5
            values = other.to_hf_config(version=5 if in_5 else 4)  # more engines read 4, which lacks the scale
        except RopeError:  # it cannot express ropes of several kinds
            values = other.to_hf_config(version=5)
        values = {"model_type": "mistral3", "text_config": values} if inside else values
        note = "It was compared as the config.json of the same model, converted for transformers."
        asked = replace(asked, pairing=None, base=None)
    if source.is_denoiser(values):
        fix = "What engines read is known for language models. dataclasses.replace(rope, base=BASE) has another base."
        raise error(name, "the config must be that of a language model", f"{values['_class_name']} of diffusers", fix)
    known = source.without_keys(values, find_engine_keys(values), name)
    ropes = hf.read(known, name, asked)
    path, text = find_text(values)
    if PAIRING_KEY in text:
        known = source.without_keys(known, (".".join((*path, PAIRING_KEY)),), name)
        ropes = hf.read(known, name, asked)
        note = f"No engine reads {PAIRING_KEY}. They rotate as for any other {ropes.model_type}."
    file_format, warnings = ("", ()) if other is None else (other.file_format, other.warnings)
    warnings = tuple(dict.fromkeys((*warnings, *ropes.warnings, *filter(None, [note]))))
    return replace(ropes, warnings=warnings, file_format=file_format), values


def find_engine_keys(values: Mapping[str, Any], path: str = "", depth: int = 0) -> tuple[str, ...]:
    """Find the keys that only inference engines read in `rope_scaling` and `rope_parameters`, also in nested configs.

    Args:
        values: the config, or an object in it.
        path, depth: the path of this object in the config, e.g. "text_config.rope_scaling", and its depth.

    Returns:
        The paths of the keys, e.g. "rope_scaling.attn_factor".
    """
    found: list[str] = []
    inside = any(section in path.split(".") for section in SECTIONS)
    for key, value in values.items():
        here = f"{path}.{key}".strip(".")
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            found += find_engine_keys(value, here, depth + 1)
        elif inside and key in ENGINE_KEYS:
            found.append(here)
    return tuple(found)


def distinct_ropes(ropes: ModelRopes, values: Mapping[str, Any], *chosen: Engine) -> list[tuple[ConfigRope, list[int]]]:
    """Return each distinct rope with the config keys for it and the indices of its layers. Omit unrotated layers.

    Layers with other windows, listed bases, or kinds that an engine assigns are apart, even if their ropes are equal.

    Args:
        ropes: the ropes of a config.
        values: the config, with the keys that only engines read.
        chosen: the engines.
    """
    kinds = ropes.layer_kinds or ("",) * len(ropes.layers)
    found: dict[tuple[object, ...], tuple[ConfigRope, list[int]]] = {}
    shared = _whole(ropes, values)
    for index, (rope, kind) in enumerate(zip(ropes.layers, kinds, strict=True)):
        if rope is not None:
            one = _config_rope(shared, ropes, rope, kind, index)
            key = (rope, kind, one.window, one.listed_base, *(entry.kind_of_layer(one, index) for entry in chosen))
            found.setdefault(key, (one, []))[1].append(index)
    return list(found.values())


def _whole(ropes: ModelRopes, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ConfigRope` that all ropes of a config share."""
    (path, text), model = find_text(values), str(values.get("model_type"))
    if getattr(ARCHITECTURES.get(model), "refusal", ""):  # engines that have it by this name mean the other model
        model = name_of(model, values)
    draft = "draft_vocab_size" in values or "speculators_model_type" in values  # which other files run
    return {
        "model_type": ropes.model_type,
        "longest": ropes.max_position_embeddings,
        "model": "/".join(("a draft" if draft else model, *([ropes.model_type] if path else []))),
        "known": ropes.model_type in ARCHITECTURES and not draft,
        "whole": values,
        "values": text,
        "layers": len(ropes.layers),
        "stated_twice": ropes.stated_twice,
        "file_format": ropes.file_format,
        "ropes": dict(zip(reversed(ropes.layer_kinds), reversed(ropes.layers), strict=True)),
    }


def _config_rope(shared: Mapping[str, Any], ropes: ModelRopes, rope: Rope, kind: str, layer: int) -> ConfigRope:
    row = ARCHITECTURES.get(ropes.model_type)
    own = None if row is None else row.kinds.get(kind)
    name = kind if own is None or not own.section else own.section
    section, nested = ({}, False) if rope.scaling is None else _section_keys(shared["values"], name)
    place: Any = {"kind": kind, "section_name": name, "layer": layer, "window": ropes.window(layer)}
    found = ConfigRope(rope, section=section, nested=nested, **place, **shared)
    # With a class that keeps both sections, engines read the file as it is.
    if not ropes.stated_twice or (row is not None and row.sections == "rope_parameters"):
        return found
    values = found.as_transformers(find_text(ropes.to_hf_config(version=5))[1])
    section, nested = ({}, False) if rope.scaling is None else _section_keys(values, name)
    return replace(found, by_transformers=replace(found, values=values, section=section, nested=nested))


def _section_keys(values: Mapping[str, Any], name: str) -> tuple[dict[str, Any], bool]:
    """Return the keys of `rope_scaling` and `rope_parameters` that apply to the kind of layer called `name` there.

    Also return whether one of these two objects contains an object for this kind.
    """
    keys: dict[str, Any] = {}
    nested = False
    for section in (values.get(name) for name in SECTIONS):
        if not isinstance(section, Mapping):
            continue
        own = section.get(name)
        nested = nested or isinstance(own, Mapping)
        keys.update({key: value for key, value in section.items() if not isinstance(value, Mapping)})
        keys.update(own if isinstance(own, Mapping) else {})
    return keys, nested


def apply_engine(engine: Engine, ropes: ModelRopes, values: Mapping[str, Any]) -> ModelRopes:
    """Return a copy of `ropes` with the ropes that the engine computes, and with its notes as further warnings.

    Raises:
        RopeError: the engine cannot run the config, does not have the model, or was not recorded.
    """
    layers, notes = list(ropes.layers), list(ropes.warnings)
    for config_rope, indices in distinct_ropes(ropes, values, engine):
        rope = _engine_rope(engine, config_rope, ropes.source, notes)
        for index in indices:
            layers[index] = rope
    kind, shared = ropes.layer_kinds[0] if ropes.layer_kinds else "", _whole(ropes, values)
    extra_ropes = {
        name: _engine_rope(engine, _config_rope(shared, ropes, rope, kind, 0), ropes.source, notes, by_rule=True)
        for name, rope in ropes.extra_ropes.items()
    }
    scale = ropes.query_scale
    if (
        scale is not None
        and scale.llama_4_scaling_beta is not None
        and engine.query_scale
        and not engine.reads(ropes.file_format)
    ):
        notes.append(f"{engine.name} {engine.version} does not scale q by its position: {engine.query_scale}.")
        scale = None
    return replace(
        ropes, layers=tuple(layers), extra_ropes=extra_ropes, query_scale=scale, warnings=tuple(dict.fromkeys(notes))
    )


def _engine_rope(
    engine: Engine, config_rope: ConfigRope, source: str, notes: list[str], *, by_rule: bool = False
) -> Rope:
    """Return the rope of an engine, and add its notes.

    The keys that a model's file reads for a further rope of its layers were not recorded, so `by_rule` omits them.
    """
    answer: Answer = engine.apply_rule(config_rope) if by_rule else engine.answer(config_rope)
    if answer.rope is None:
        must = f"{engine.name} {engine.version} must run the config"
        source_code = f"Its code: {answer.source}. " if answer.source else ""
        raise error(source, must, answer.refusal, f"{source_code}Choose another engine, or change the config.")
    new = [*answer.notes, *([] if answer.rope.is_static else [_LENGTH_NOTES[answer.decided_by]])]
    how = "" if answer.evidence == "run" else f" ({_HOW[answer.evidence]})"
    notes += [f"{engine.name} {engine.version}{how}: {note}" for note in new if note]
    return answer.rope
