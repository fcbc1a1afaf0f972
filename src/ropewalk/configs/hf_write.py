"""`to_hf_config`: write the keys about rotation of a Hugging Face config in the schema of transformers 4 or 5."""

from __future__ import annotations

import math
from typing import Any

from ropewalk._checks import error, shown
from ropewalk.configs.architecture import Architecture, Kind
from ropewalk.configs.axes_rules import AxesRule
from ropewalk.configs.layer_ropes import LayerRopes
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.reader import SECTIONS
from ropewalk.configs.source import to_plain
from ropewalk.rope.rope import Rope

_WHO = "ModelRopes.to_hf_config"


def write(ropes: LayerRopes, version: int) -> dict[str, Any]:
    """Return the config in the schema of a version of transformers. See `ModelRopes.to_hf_config`."""
    if type(version) is not int or version not in (4, 5):
        raise error(_WHO, "version must be 4 or 5", shown(version), "Pass the major version of transformers.")
    if not ropes.layers:
        fix = "Keep the config that was read."
        raise error(_WHO, "the ropes must be those of a text model", f"{ropes.model_type}, a vision tower", fix)
    row = ARCHITECTURES.get(ropes.model_type)
    if row is None or ropes.config is None:
        raise error(
            _WHO,
            "the ropes must come from a Hugging Face config",
            shown(ropes.model_type),
            "Write its config by hand.",
        )
    if why := row.why_unwritable(version):
        raise error(_WHO, "the model's code must be able to read the written config", ropes.model_type, why)
    config = _without_rope_keys(ropes.config, row)
    first = dict(zip(reversed(ropes.layer_kinds), reversed(ropes.layers), strict=True))
    kinds = {name: (kind, first.get(name)) for name, kind in row.kinds.items() if kind is not None}
    rotating = {name: (kind, rope) for name, (kind, rope) in kinds.items() if rope is not None}
    if version == 5:
        parameters = {kind.section or name: _parameters(rope, row, ropes) for name, (kind, rope) in rotating.items()}
        scaled = [_parameters(rope, row, ropes) for kind, rope in rotating.values() if kind.scaled]
        config["rope_parameters"] = parameters if _nested(row) else next(iter([*scaled, *parameters.values()]), None)
    else:
        config.update(_version_4(rotating, row, ropes))
    if not rotating:
        config.update(row.keys_without_ropes(version))
    return config


def _nested(row: Architecture) -> bool:
    """Whether `rope_parameters` must have an object for each kind of layer.

    This is the case if the layers differ, `Architecture.flat` is False, and either several kinds rotate or no top-level
    key states the base of the only kind that rotates.
    """
    rotating = [kind for kind in row.kinds.values() if kind is not None]
    return len(row.kinds) > 1 and not row.flat and (len(rotating) > 1 or not rotating[0].bases)


def _without_rope_keys(config: Any, row: Architecture) -> dict[str, Any]:
    drop = {*SECTIONS, *row.base_keys(), *row.partial_keys}
    return {key: to_plain(value, _WHO) for key, value in config.items() if key not in drop}


def _parameters(rope: Rope, row: Architecture, ropes: LayerRopes) -> dict[str, Any]:
    """Return the parameters of one kind of layer in the schema of transformers 5."""
    if rope.axes is not None and row.axes is None:
        raise error(
            _WHO,
            "this model_type must have ropes of one axis",
            repr(rope),
            "Write the sections by hand.",
        )
    scheme = rope.scaling
    parameters = {"rope_theta": rope.base, **({"rope_type": "default"} if scheme is None else scheme.to_hf())}
    fraction = _fraction(rope, row, ropes)
    if fraction is not None:
        parameters["partial_rotary_factor"] = fraction
    if row.axes is not None:
        parameters.update(_sections(rope, row.axes, ropes))
    if ropes.query_scale is not None and ropes.query_scale.beta:
        parameters["llama_4_scaling_beta"] = ropes.query_scale.beta
    return parameters


def _sections(rope: Rope, rule: AxesRule, ropes: LayerRopes) -> dict[str, Any]:
    """Return the keys of `rope_parameters` that assign the pairs of a rope to axes."""
    if rope.axes is None:
        fix = "Read the config without text_only=True."
        raise error(_WHO, f"the ropes of {ropes.model_type} must have axes", repr(rope), fix)
    sections = rule.sections(rope.axes)
    if sections is None:
        must = f"the config of {ropes.model_type} must be able to express the axes"
        raise error(_WHO, must, repr(rope.axes), "Write its config by hand.")
    return {rule.keys[0]: sections} if rule.keys else {}


def _fraction(rope: Rope, row: Architecture, ropes: LayerRopes) -> float | None:
    """Return partial_rotary_factor, or None if the config does not need it."""
    if not row.needs_fraction(ropes.config or {}) or (rope.scaling is not None and rope.scaling.whole_head):
        return None
    fraction = rope.rotary_dim / rope.head_dim
    return fraction if int(rope.head_dim * fraction) == rope.rotary_dim else math.nextafter(fraction, 1.0)


def _version_4(rotating: dict[str, tuple[Kind, Rope]], row: Architecture, ropes: LayerRopes) -> dict[str, Any]:
    """Return the keys about rotation in the schema of transformers 4: top-level keys and one `rope_scaling`.

    Raises:
        RopeError: the layers differ in a way that this schema cannot express.
    """
    config: dict[str, Any] = {}
    scalings = []
    for name, (kind, rope) in rotating.items():
        if kind.bases:
            key = kind.bases[-1 if "." in kind.bases[0] else 0]
            if config.setdefault(key, rope.base) != rope.base:
                raise error(_WHO, f"all layers must have the same {key}", "several", "Pass version=5.")
        elif kind.implied_base is None:
            raise error(_WHO, "each kind of layer must have its own key for the base", name, "Pass version=5.")
        parameters = _parameters(rope, row, ropes)
        fraction = parameters.pop("partial_rotary_factor", None)
        if fraction is not None and row.partial_keys:
            config[row.partial_keys[0]] = fraction
        del parameters["rope_theta"]
        if kind.scaled:
            scalings.append(parameters)
        elif parameters != {"rope_type": "default"}:
            raise error(_WHO, f"layers of kind {name} must have no scaling", repr(rope), "Pass version=5.")
    if any(scaling != scalings[0] for scaling in scalings):
        raise error(_WHO, "all layers must have the same scaling", "several", "Pass version=5.")
    if scalings and scalings[0] != {"rope_type": "default"}:
        config["rope_scaling"] = scalings[0]
    return config
