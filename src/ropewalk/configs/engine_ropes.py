"""Compute the ropes of a config as an inference engine does, by the rules in `ropewalk.engines`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import error
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.reader import SECTIONS
from ropewalk.engines import ENGINE_KEYS, Answer, ConfigRope, Engine
from ropewalk.rope import Rope

_MAX_DEPTH = 4
_LENGTH_NOTES = {
    "nothing": "",
    "the call": "It uses the length of the sequences in each call: pass that length to at_length.",
    "the setting": "It uses the length that was configured at startup: pass that length to at_length.",
}


def find_engine_keys(values: Mapping[str, Any], path: str = "", depth: int = 0) -> dict[str, Any]:
    """Find the keys that only inference engines read in `rope_scaling` and `rope_parameters`, also in nested configs.

    Args:
        values: the config, or an object in it.
        path, depth: the path of this object in the config, e.g. "text_config.rope_scaling", and its depth.

    Returns:
        A dict from the paths of the keys, e.g. "rope_scaling.attn_factor", to their values.
    """
    engine_keys = {}
    inside = any(section in path.split(".") for section in SECTIONS)
    for key, value in values.items():
        here = f"{path}.{key}".strip(".")
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            engine_keys.update(find_engine_keys(value, here, depth + 1))
        elif inside and key in ENGINE_KEYS:
            engine_keys[here] = value
    return engine_keys


def distinct_ropes(ropes: ModelRopes, engine_keys: Mapping[str, Any]) -> list[tuple[ConfigRope, list[int]]]:
    """Return each distinct rope with the config keys for it and the indices of its layers. Omit unrotated layers.

    Args:
        ropes: the ropes of a config.
        engine_keys: the result of `find_engine_keys` for the config.
    """
    kinds = ropes.layer_kinds or ("",) * len(ropes.layers)
    layers_of: dict[tuple[Rope, str], list[int]] = {}
    for index, (rope, kind) in enumerate(zip(ropes.layers, kinds, strict=True)):
        if rope is not None:
            layers_of.setdefault((rope, kind), []).append(index)
    return [(_config_rope(ropes, rope, kind, engine_keys), layers) for (rope, kind), layers in layers_of.items()]


def _config_rope(ropes: ModelRopes, rope: Rope, kind: str, engine_keys: Mapping[str, Any]) -> ConfigRope:
    section_keys, nested = ({}, False) if rope.scaling is None else _section_keys(ropes, kind)
    if rope.scaling is not None:
        of_kind = {*SECTIONS, _section_name(ropes.model_type, kind)}
        section_keys.update({key.split(".")[-1]: v for key, v in engine_keys.items() if key.split(".")[-2] in of_kind})
    return ConfigRope(rope, ropes.model_type, ropes.max_position_embeddings, section_keys, nested)


def _section_name(model_type: str, kind: str) -> str:
    row = ARCHITECTURES.get(model_type)
    row_kind = None if row is None else row.kinds.get(kind)
    return kind if row_kind is None or not row_kind.section else row_kind.section


def _section_keys(ropes: ModelRopes, kind: str) -> tuple[dict[str, Any], bool]:
    """Return the keys of `rope_scaling` and `rope_parameters` that apply to a kind of layer.

    Also return whether one of these two objects contains an object for this kind.
    """
    keys: dict[str, Any] = {}
    nested = False
    for name in SECTIONS:
        section = (ropes.config or {}).get(name)
        if not isinstance(section, Mapping):
            continue
        own = section.get(_section_name(ropes.model_type, kind))
        nested = nested or isinstance(own, Mapping)
        keys.update({key: value for key, value in section.items() if not isinstance(value, Mapping)})
        keys.update(own if isinstance(own, Mapping) else {})
    return keys, nested


def apply_engine(engine: Engine, ropes: ModelRopes, engine_keys: Mapping[str, Any]) -> ModelRopes:
    """Return a copy of `ropes` with the ropes that the engine computes, and with its notes as further warnings.

    Raises:
        RopeError: the engine cannot run the config.
    """
    layers, notes = list(ropes.layers), list(ropes.warnings)
    for config_rope, indices in distinct_ropes(ropes, engine_keys):
        rope = _engine_rope(engine, config_rope, ropes.source, notes)
        for index in indices:
            layers[index] = rope
    extra_ropes = {
        name: _engine_rope(
            engine,
            _config_rope(ropes, rope, ropes.layer_kinds[0] if ropes.layer_kinds else "", engine_keys),
            ropes.source,
            notes,
        )
        for name, rope in ropes.extra_ropes.items()
    }
    scale = ropes.query_scale
    if scale is not None and scale.beta and engine.query_scale:
        notes.append(f"{engine.name} {engine.version} does not scale q by its position: {engine.query_scale}.")
        scale = None
    return replace(
        ropes, layers=tuple(layers), extra_ropes=extra_ropes, query_scale=scale, warnings=tuple(dict.fromkeys(notes))
    )


def _engine_rope(engine: Engine, config_rope: ConfigRope, source: str, notes: list[str]) -> Rope:
    answer: Answer = engine.answer(config_rope)
    if answer.rope is None:
        must = f"{engine.name} {engine.version} must run the config"
        source_code = f"Its code: {answer.source}. " if answer.source else ""
        raise error(source, must, answer.refusal, f"{source_code}Choose another engine, or change the config.")
    new = [*answer.notes, *([] if answer.rope.is_static else [_LENGTH_NOTES[answer.decided_by]])]
    how = "" if answer.evidence == "run" else " (read, not run)"
    notes += [f"{engine.name} {engine.version}{how}: {note}" for note in new if note]
    return answer.rope
