"""Read Hugging Face's config.json in the schemas of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`).

The `Architecture` of the model_type, from `models.py`, reads the config. Then any key about rotation that was not read
is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from ropewalk._checks import RopeError, argument, nearest, shown
from ropewalk.configs import unread_keys, vision
from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families import unknown
from ropewalk.configs.fields import Fields
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES, vocabulary
from ropewalk.configs.reader import Reader
from ropewalk.configs.wrappers import text_part


def read(
    config: Mapping[str, Any],
    source: str,
    *,
    pairing: str | None,
    base: float | None,
    text_only: bool,
) -> ModelRopes:
    """Read the ropes of a Hugging Face config. See `from_config` for arguments and errors."""
    fields = Fields(config, source)
    tower = vision.standalone_tower(fields)
    if tower is not None:
        if pairing is not None or base is not None:
            must, fix = "must be that of a text model if pairing or base is passed", "Omit pairing and base."
            raise fields.error("model_type", must, f"{tower.model_type}, a vision tower", fix)
        if text_only:
            must = "must be that of a text model if text_only is passed"
            fix = "Pass the config of the whole model, or omit text_only to read the tower."
            raise fields.error("model_type", must, f"{tower.model_type}, a vision tower", fix)
        return ModelRopes((), tower.model_type, source, vision=tower)
    ropes = _read_text(fields, pairing=pairing, base=base, text_only=text_only)
    warnings: list[str] = []
    tower = None if text_only else vision.nested_tower(fields, warnings)
    return dataclasses.replace(ropes, vision=tower, warnings=(*ropes.warnings, *warnings))


def find_text(config: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """Return the keys that lead to the config of the text model inside a config that can be read, and that config."""
    fields = Fields(config, "config")
    while (inner := text_part(fields, ARCHITECTURES, False)) is not None:
        fields = Fields(inner.config, inner.source, inner.path)
    path = fields.path.split(".")[:-1]
    return path, functools.reduce(operator.getitem, path, config)


def _read_text(fields: Fields, *, pairing: str | None, base: float | None, text_only: bool) -> ModelRopes:
    """Read the ropes of a text model, or of the text model inside the config of a multimodal model."""
    inner = text_part(fields, ARCHITECTURES, pairing is not None)
    if inner is not None:
        text = Fields(inner.config, inner.source, inner.path)
        ropes = _read_text(text, pairing=pairing, base=base, text_only=text_only)
        return dataclasses.replace(ropes, warnings=(*ropes.warnings, *inner.warnings))
    reader = Reader(fields, pairing=pairing, base=base, text_only=text_only)
    unread_keys.check_size(fields)
    row = _find_row(reader)
    try:
        layer_ropes = row.read(reader)
    except RopeError:
        if row.is_supported:
            unread_keys.refuse_misspelt(fields, vocabulary())
        raise
    if any(row.kinds.values()):  # in a model that never rotates, such keys have no effect
        reader.warnings += unread_keys.refuse(fields, row.keys_without_effect, row.keys())
    values = {f.name: getattr(layer_ropes, f.name) for f in dataclasses.fields(layer_ropes)}
    return ModelRopes(**{**values, "origins": reader.origins, "warnings": tuple(reader.warnings)})


def _find_row(c: Reader) -> Architecture:
    """Return the `Architecture` of the config's model_type.

    If the model_type is unknown and the caller passed a pairing, build a general `Architecture`.
    """
    model_type = c.fields.get("model_type")
    if not isinstance(model_type, str):
        fix = "Pass a model's config.json as transformers writes it; other programs use other keys."
        raise c.fields.error("model_type", "must be a string", shown(model_type), fix)
    row = ARCHITECTURES.get(model_type)
    if row is not None:
        return row
    if c.passed_pairing is not None:
        return unknown.architecture(c, c.passed_pairing)
    inside = [key for key, value in c.fields.config.items() if isinstance(value, Mapping) and "model_type" in value]
    hint = f" It contains other models: pass config[{inside[0]!r}]." if inside else _class_hint(c)
    raise c.fields.error(
        "model_type",
        "must be one that ropewalk knows",
        shown(model_type),
        f"The config alone does not define its rotation.{nearest(model_type, ARCHITECTURES)}{hint} If all layers "
        f"rotate alike, as in Llama, pass {argument('pairing', 'half')} or {argument('pairing', 'interleaved')}.",
    )


def _class_hint(c: Reader) -> str:
    """Return a hint if the key `architectures` names the class of a known model, else ""."""
    classes = c.fields.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    match = (
        re.fullmatch(r"(\w{2,60})For(CausalLM|ConditionalGeneration|MaskedLM)", name) if isinstance(name, str) else None
    )
    key = match[1].lower() if match is not None else ""
    known = next((model_type for model_type in ARCHITECTURES if model_type.replace("_", "") == key), None)
    if known is None:
        return ""
    return f" Its class is {name}. If it is that model, pass {{**config, 'model_type': {known!r}}}."
