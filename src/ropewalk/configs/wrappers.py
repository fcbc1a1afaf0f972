"""Find the text model inside the config of a multimodal model, and add the keys that its config omits.

transformers omits values that equal the defaults of a class from the config of a nested model. A missing key therefore
means the default, but only in nested configs. For example, the text config of Gemma 3 4B has neither base nor head_dim,
and the text config of LLaVA 1.5 has no sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk._checks import shown
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.reader import SECTIONS, Fields
from ropewalk.configs.tables.wrappers import (
    DEFAULTS,
    FLAT_AS,
    FLAT_OR_NESTED,
    MISSING_MODEL_TYPES,
    OTHER_KEYS,
    OTHER_PARTS,
    TEXT_AS,
    TEXT_KEYS,
    TOWER_KEYS,
    WRAPPERS,
)


def text_model(fields: Fields, pairing_passed: bool = False) -> Fields:
    """Return the text model inside the config of a multimodal model, or `fields` if it is the config of a text model.

    Args:
        fields: the whole config.
        pairing_passed: whether the caller passed a pairing. A config with an unknown model_type is then treated as that
            of a text model.

    Returns:
        The config, with warnings about what was assumed.

    Raises:
        RopeError: the config of the text model is missing or not an object.
    """
    while (inner := _text_part(fields, pairing_passed)) is not None:
        inner.warnings += fields.warnings
        fields = inner
    return fields


def _text_part(fields: Fields, pairing_passed: bool) -> Fields | None:
    layers = fields.get("transformer_layer_config")
    if fields.has("speculators_model_type") and isinstance(layers, Mapping):  # a draft of speculators
        return _part(fields, "transformer_layer_config", layers)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        return None
    nested_key = FLAT_OR_NESTED.get(model_type)
    nested = None if nested_key is None or fields.has("num_hidden_layers") else fields.get(nested_key)
    if nested_key is not None and isinstance(nested, Mapping):
        return _part(fields, nested_key, nested, *_beside(fields, nested_key, nested))
    if model_type not in WRAPPERS:
        return None if model_type in ARCHITECTURES or pairing_passed else _part_of_unknown(fields, model_type)
    key = WRAPPERS[model_type]
    if not fields.has(key):
        key = OTHER_KEYS.get(model_type, key)
    inner = fields.get(key)
    flat = FLAT_AS.get(model_type)
    has_sizes = isinstance(inner, Mapping) and inner.get("num_hidden_layers") is not None
    if flat is not None and fields.has("num_hidden_layers") and not has_sizes:
        warning = f"model_type {model_type} has the keys of its text model at the top level and is read as {flat}."
        part = Fields({**fields.config, "model_type": flat, key: None}, fields.source, fields.path)
        part.warnings.append(warning)
        return part
    if not isinstance(inner, Mapping):
        fix = "It must contain the text model."
        if inner is None and f"{model_type}_text" in ARCHITECTURES:
            fix += f" If the file is the text model alone, its model_type is {model_type + '_text'!r}."
        raise fields.error(key, "must be an object", shown(inner), fix)
    whole = dict(inner)
    if "model_type" not in whole and model_type in MISSING_MODEL_TYPES:
        whole["model_type"] = MISSING_MODEL_TYPES[model_type]
    if model_type in TEXT_AS:
        read_as, keys = TEXT_AS[model_type]
        whole |= {"model_type": read_as, **{key: fields.get(key) for key in keys if fields.has(key)}}
    return _part(fields, key, whole, *_beside(fields, key, whole))


def _beside(fields: Fields, key: str, inner: Mapping[str, Any]) -> list[str]:
    said = f"{{}} beside {key} is not read, and transformers may reject a file with it. Move it into {key}."
    outer = [(section, fields.get(section)) for section in SECTIONS]
    beside = [name for name, at in outer if isinstance(at, Mapping) and "factor" in at and at != inner.get(name)]
    return [said.format(name) for name in beside]


def _part(fields: Fields, key: str, inner: Mapping[str, Any], *warnings: str) -> Fields:
    """Return the text model under a key, with the defaults of its class added."""
    whole, added = with_class_defaults(inner)
    part = Fields(whole, f"{fields.source}: {key}", f"{fields.path}{key}.")
    part.warnings += warnings
    if added:
        reason = "not stated, because transformers omits the defaults of a class. Those defaults are used."
        part.assume(f"{', '.join(added)}: {reason}")
    return part


def _part_of_unknown(fields: Fields, model_type: str) -> Fields | None:
    """Return the text model inside a config with an unknown model_type, or None if no known text model is inside.

    Raises:
        RopeError: several parts have a known model_type, so that it is not clear which one is the model.
    """
    parts = [key for key in fields.config if key not in TOWER_KEYS and _has_type(fields.get(key))]
    keys = [key for key in TEXT_KEYS if key in parts]
    if not keys:
        return None
    if len(parts) > 1:
        must = f"must be one that ropewalk knows, as {len(parts)} parts of this model could be meant"
        calls = " or ".join(f"from_config(config[{key!r}])" for key in parts)
        raise fields.error("model_type", must, shown(model_type), f"Read each part by itself: {calls}.")
    warning = f"model_type {model_type!a:.80} is not known, but its text model under {keys[0]} is."
    return _part(fields, keys[0], fields.get(keys[0]), warning)


def _has_type(inner: object) -> bool:
    """Whether a value is the config of a known text model, or of a model that contains one."""
    inner_type = inner.get("model_type") if isinstance(inner, Mapping) else None
    return isinstance(inner_type, str) and (inner_type in ARCHITECTURES or inner_type in WRAPPERS)


def other_parts(fields: Fields) -> list[tuple[str, Fields]]:
    """Return the keys and configs of the parts that rotate beside the one that `text_model` returns (an encoder)."""
    model_type = fields.get("model_type")
    keys = OTHER_PARTS.get(model_type, ()) if isinstance(model_type, str) else ()
    parts = [(key, _part(fields, key, inner)) for key in keys if isinstance(inner := fields.get(key), Mapping)]
    return [(key, text_model(part)) for key, part in parts]


def with_class_defaults(inner: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a text model with the defaults of its class added, and the names of the added keys.

    No base is added if `rope_scaling` or `rope_parameters` states one, since the two bases could contradict each other.
    """
    model_type = inner.get("model_type")
    defaults = DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    sections = [value for key in SECTIONS if isinstance(value := inner.get(key), Mapping)]
    nested = [value for section in sections for value in section.values() if isinstance(value, Mapping)]
    has_base = any("rope_theta" in section for section in [*sections, *nested])
    added = [
        key for key, value in defaults.items() if inner.get(key) is None and not (has_base and key.startswith("rope_"))
    ]
    return {**inner, **{key: defaults[key] for key in added}}, added
