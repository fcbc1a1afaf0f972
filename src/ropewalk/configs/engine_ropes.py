"""The ropes of a config as an engine has them: each rope with what the config says of it, put to the engine's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import error
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.reader import SECTIONS
from ropewalk.engines import ENGINE_KEYS, Answer, Asked, Engine
from ropewalk.rope import Rope

_DEEPEST = 4
_LENGTH = {
    "nothing": "",
    "the call": "At each call it takes the length of the sequences there: at_length(n) with that n.",
    "the setting": "It takes the length that it was set to when it started: at_length(n) with that n, at every call.",
}


def set_aside(values: Mapping[str, Any], path: str = "", depth: int = 0) -> dict[str, Any]:
    """Keys of rope sections that engines read and models do not: where each stands, as "a.b", and its value."""
    found = {}
    inside = any(section in path.split(".") for section in SECTIONS)
    for key, value in values.items():
        here = f"{path}.{key}".strip(".")
        if isinstance(value, Mapping) and depth < _DEEPEST:
            found.update(set_aside(value, here, depth + 1))
        elif inside and key in ENGINE_KEYS:
            found[here] = value
    return found


def asked(ropes: ModelRopes, aside: Mapping[str, Any]) -> list[tuple[Asked, list[int]]]:
    """Each distinct rope, with what the config says of it, and its layers; layers that do not rotate are left out.

    Args:
        ropes: as they were read.
        aside: what `set_aside` found in the config.
    """
    kinds = ropes.layer_kinds or ("",) * len(ropes.layers)
    layers_of: dict[tuple[Rope, str], list[int]] = {}
    for index, (rope, kind) in enumerate(zip(ropes.layers, kinds, strict=True)):
        if rope is not None:
            layers_of.setdefault((rope, kind), []).append(index)
    return [(_asked(ropes, rope, kind, aside), layers) for (rope, kind), layers in layers_of.items()]


def _asked(ropes: ModelRopes, rope: Rope, kind: str, aside: Mapping[str, Any]) -> Asked:
    stated, nested = ({}, False) if rope.scaling is None else _stated(ropes, kind)
    if rope.scaling is not None:
        of_kind = {*SECTIONS, _section(ropes.model_type, kind)}
        stated.update({key.split(".")[-1]: v for key, v in aside.items() if key.split(".")[-2] in of_kind})
    return Asked(rope, ropes.model_type, ropes.max_position_embeddings, stated, nested)


def _section(model_type: str, kind: str) -> str:
    row = ARCHITECTURES.get(model_type)
    described = None if row is None else row.kinds.get(kind)
    return kind if described is None or not described.section else described.section


def _stated(ropes: ModelRopes, kind: str) -> tuple[dict[str, Any], bool]:
    """What the sections of the config say of a kind of layer, and whether they are nested."""
    stated: dict[str, Any] = {}
    nested = False
    for name in SECTIONS:
        section = (ropes.config or {}).get(name)
        if not isinstance(section, Mapping):
            continue
        own = section.get(_section(ropes.model_type, kind))
        nested = nested or isinstance(own, Mapping)
        stated.update({key: value for key, value in section.items() if not isinstance(value, Mapping)})
        stated.update(own if isinstance(own, Mapping) else {})
    return stated, nested


def with_numbers_of(engine: Engine, ropes: ModelRopes, aside: Mapping[str, Any]) -> ModelRopes:
    """The ropes with the engine's numbers, and what there is to say of them among the warnings.

    Raises:
        RopeError: the engine does not run the config.
    """
    layers, notes = list(ropes.layers), list(ropes.warnings)
    for each, rows in asked(ropes, aside):
        rope = _rope(engine, each, ropes.source, notes)
        for row in rows:
            layers[row] = rope
    others = {
        name: _rope(
            engine, _asked(ropes, rope, ropes.layer_kinds[0] if ropes.layer_kinds else "", aside), ropes.source, notes
        )
        for name, rope in ropes.others.items()
    }
    scale = ropes.query_scale
    if scale is not None and scale.beta and engine.query_scale:
        notes.append(f"{engine.name} {engine.version} does not scale q by its position: {engine.query_scale}.")
        scale = None
    return replace(ropes, layers=tuple(layers), others=others, query_scale=scale, warnings=tuple(dict.fromkeys(notes)))


def _rope(engine: Engine, each: Asked, source: str, notes: list[str]) -> Rope:
    answer: Answer = engine.answer(each)
    if answer.rope is None:
        must = f"{engine.name} {engine.version} must run the config"
        cure = f"Its code: {answer.source}. " if answer.source else ""
        raise error(source, must, answer.refused, f"{cure}Choose another engine, or change the config.")
    said = [*answer.notes, *([] if answer.rope.is_static else [_LENGTH[answer.decided_by]])]
    ran = "" if answer.seen == "run" else " (read, not run)"
    notes += [f"{engine.name} {engine.version}{ran}: {note}" for note in said if note]
    return answer.rope
