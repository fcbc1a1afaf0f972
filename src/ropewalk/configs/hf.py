"""Read Hugging Face's config.json in the schemas of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`).

The `Architecture` of the model_type, from `models.py`, reads the config. Then any key about rotation that was not read
is an error.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk._checks import RopeError, argument, nearest, shown
from ropewalk.configs import hf_scheme, unread_keys, vision
from ropewalk.configs.architecture import Architecture
from ropewalk.configs.families import unknown
from ropewalk.configs.fields import ConfigValue, Fields
from ropewalk.configs.layers import NO_ROPE
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.models import ARCHITECTURES, vocabulary
from ropewalk.configs.reader import Reader
from ropewalk.configs.wrappers import text_model
from ropewalk.rope.rope import Rope
from ropewalk.schemes import Scaling


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
    text = text_model(fields, ARCHITECTURES, pairing is not None)
    reader = Reader(text.config, text.source, text.path, pairing=pairing, base=base, text_only=text_only)
    ropes = _read_text(reader)
    warnings: list[str] = []
    tower = None if text_only else vision.nested_tower(fields, warnings)
    return replace(ropes, vision=tower, warnings=(*ropes.warnings, *text.warnings, *warnings))


def find_text(config: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """Return the keys that lead to the config of the text model inside a config that can be read, and that config."""
    path = text_model(Fields(config, "config"), ARCHITECTURES, False).path.split(".")[:-1]
    return path, functools.reduce(operator.getitem, path, config)


def _read_text(c: Reader) -> ModelRopes:
    unread_keys.check_size(c)
    row = _find_row(c)
    try:
        ropes = _read_ropes(row, c)
    except RopeError:
        if not row.refusal:
            unread_keys.refuse_misspelt(c, vocabulary())
        raise
    if any(row.kinds.values()):  # in a model that never rotates, such keys have no effect
        c.warnings += unread_keys.refuse(c, row.keys_without_effect, row.keys())
    return replace(ropes, warnings=tuple(c.warnings))


def _read_ropes(row: Architecture, c: Reader) -> ModelRopes:
    """Read the ropes of all layers of a text model, by the steps of its row."""
    row.refuse_unsupported(c)
    pairing = row.read_pairing(c)
    layers = row.kinds_of_layers(c)
    ropes: dict[str, Rope | None] = {NO_ROPE: None}
    extra_ropes: dict[str, Rope] = {}
    schemes: list[Scaling] = []
    for name in dict.fromkeys(layers):
        kind = row.kinds.get(name)
        if kind is None or c.is_null_kind(kind.section or name):
            ropes[name] = None
            continue
        rope_keys = row.collect(c, name, kind, layers)
        base = row.base(c, name, kind, rope_keys)
        scheme = _scheme(row, c, rope_keys, bool(schemes))
        head_dim, rotary_dim, offset = row.shape(c, name, kind, rope_keys, scheme, layers)
        axes = row.axes_of(c, rope_keys, rotary_dim)
        with c.prefix_errors():
            rope = Rope(head_dim, base, pairing, rotary_dim=rotary_dim, rotary_offset=offset, scaling=scheme, axes=axes)
        ropes[name] = rope
        schemes += [] if scheme is None else [scheme]
        extra_ropes.update(row.extra_ropes(c, name, rope))
    c.warnings += [w for scheme in dict.fromkeys(schemes) for w in scheme.warnings(c.longest)]
    return ModelRopes(
        layers=tuple(ropes[name] for name in layers),
        model_type=str(c.get("model_type")),
        source=c.source,
        trained_length=_trained_length(c.longest, schemes) if row.trained_length is None else row.trained_length(c),
        max_position_embeddings=c.longest,
        layer_kinds=tuple(layers),
        config=dict(c.config),
        extra_ropes=extra_ropes,
        softmax_factor=row.softmax_factor(c, schemes),
        query_scale=row.read_query_scale(c),
        rotates_values=row.rotates_values,
        output_order=row.output_order if pairing == "interleaved" else None,
        axis_names=row.axis_names(ropes),
        origins=c.origins,
    )


def _scheme(row: Architecture, c: Reader, rope_keys: dict[str, ConfigValue], scaled: bool) -> Scaling | None:
    """Return the scheme that the collected keys describe, or None for no scaling.

    Record where its parameters came from. `scaled` is whether other layers have a scheme: layers without one then
    record nothing.
    """
    origins: dict[str, str] = {}
    scheme = hf_scheme.read(c, rope_keys, c.longest, origins, c.warnings, row.section_keys())
    if scheme is not None and not scaled:
        c.origins.pop("scaling", None)  # the origin that layers without a scheme recorded
    if scheme is not None or not scaled:
        for name, where in origins.items():
            c.record_origin(name, where)
    return scheme


def _trained_length(longest: int | None, schemes: list[Scaling]) -> int | None:
    """Return the length in tokens that the model was trained on before scaling, or None if it is not known."""
    lengths = [scheme.trained_length(longest) for scheme in schemes]
    known = [length for length in lengths if length is not None]
    return longest if not lengths else min(known) if len(known) == len(lengths) else None


def _find_row(c: Reader) -> Architecture:
    """Return the `Architecture` of the config's model_type.

    If the model_type is unknown and the caller passed a pairing, build a general `Architecture`.
    """
    model_type = c.get("model_type")
    if not isinstance(model_type, str):
        fix = "Pass a model's config.json as transformers writes it; other programs use other keys."
        raise c.error("model_type", "must be a string", shown(model_type), fix)
    row = ARCHITECTURES.get(model_type)
    if row is not None:
        return row
    if c.passed_pairing is not None:
        return unknown.architecture(c, c.passed_pairing)
    inside = [key for key, value in c.config.items() if isinstance(value, Mapping) and "model_type" in value]
    hint = f" It contains other models: pass config[{inside[0]!r}]." if inside else _class_hint(c)
    raise c.error(
        "model_type",
        "must be one that ropewalk knows",
        shown(model_type),
        f"The config alone does not define its rotation.{nearest(model_type, ARCHITECTURES)}{hint} If all layers "
        f"rotate alike, as in Llama, pass {argument('pairing', 'half')} or {argument('pairing', 'interleaved')}.",
    )


def _class_hint(c: Reader) -> str:
    """Return a hint if the key `architectures` names the class of a known model, else ""."""
    classes = c.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    match = (
        re.fullmatch(r"(\w{2,60})For(CausalLM|ConditionalGeneration|MaskedLM)", name) if isinstance(name, str) else None
    )
    key = match[1].lower() if match is not None else ""
    known = next((model_type for model_type in ARCHITECTURES if model_type.replace("_", "") == key), None)
    if known is None:
        return ""
    return f" Its class is {name}. If it is that model, pass {{**config, 'model_type': {known!r}}}."
