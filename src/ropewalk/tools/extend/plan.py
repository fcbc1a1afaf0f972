"""Choose a scheme and a factor with which a model reads a longer text than its config states, and write that config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk import _checks
from ropewalk._checks import RopeError, error
from ropewalk.configs.engine_ropes import find_engine_keys, ropes_for_engines
from ropewalk.configs.hf import find_text
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import read_config
from ropewalk.configs.reader import LENGTHS
from ropewalk.engines import ConfigRope
from ropewalk.rope.rope import Rope
from ropewalk.schemes import DynamicNTK, Linear, Llama3, Scaling, YaRN
from ropewalk.tools.diff.for_engine import put
from ropewalk.tools.diff.lengths import stated_length

MARGINS = {"llama3": 1.5, "yarn": 2.0, "linear": 1.5, "ntk": 2.0, "dynamic": 2.0}
"""By which factor each method must exceed target / stated length, if nobody measured the model (docs/extend.md)."""

_WHO = "ropewalk extend"


@dataclass(frozen=True)
class Source:
    """A config, as the model's own code and as engines read it.

    Args:
        ropes: the ropes of the text model, with their axes.
        text: the ropes of its text tokens.
        configs: the ropes that engines read, each with the indices of its layers.
        whole: the whole config.
        length: the longest length that it states for text, in tokens.
        stated: its max_position_embeddings, or the length of an equivalent key.
    """

    ropes: ModelRopes
    text: ModelRopes
    configs: list[tuple[ConfigRope, list[int]]]
    whole: Mapping[str, Any]
    length: int
    stated: int


@dataclass(frozen=True)
class Plan:
    """A method with its factor, and the config with it.

    Args:
        method: a key of `MARGINS`, or "none" if no layer that rotates sees farther than its window.
        factor: the factor of its scheme, or by which "ntk" slows the slowest pair; dimensionless.
        layers: the indices of the layers that it changes.
        ropes: the ropes of the text model, with their axes.
        written: the config of the text model in the schema of transformers 5, or of 4 if its code reads only that.
        whole: the whole config.
        text: the ropes of text tokens that it states.
    """

    method: str
    factor: float
    layers: list[int]
    ropes: ModelRopes
    written: Mapping[str, Any]
    whole: Mapping[str, Any]
    text: ModelRopes


def read_source(config: Any, **options: Any) -> Source:
    """Read a config for `make`, with the options of `from_config`.

    Raises:
        RopeError: the config cannot be read, or states no length.
    """
    text, configs = ropes_for_engines(config, **options)
    length = stated_length(text)
    if length is None or not configs:
        fix = "Add max_position_embeddings: the length that the model was trained for."
        must = "the config must state a length in tokens" if configs else "a layer of the model must rotate"
        raise error(text.source, must, "none", fix if configs else "It has no rope that could be scaled.")
    whole = configs[0][0].whole
    ignored = (*find_engine_keys(whole), *options.get("ignore", ()))
    kept = {
        key: options[key] for key in ("pairing", "base") if options.get(key) is not None and "factor" not in options
    }
    return Source(
        read_config(whole, ignore=ignored, **kept), text, configs, whole, length, text.max_position_embeddings or length
    )


def methods(source: Source, method: str | None) -> list[str]:
    """Return the methods to try, the best first: the one asked for, that of the config, or the two defaults."""
    if method is not None:
        return [method]
    now = _scheme(source)
    if isinstance(now, Llama3 | YaRN | Linear):
        return [now.rope_type]
    # Engines divide the pairs among axes without a scheme and with YaRN, and not with Llama 3's scheme.
    return ["yarn"] if any(rope is not None and rope.axes for rope in source.ropes.layers) else ["llama3", "yarn"]


def make(source: Source, target: int, method: str, factor: float | None) -> Plan:
    """Return the config with a method.

    Args:
        source: the config.
        target: the length to reach, in tokens.
        method: a key of `MARGINS`.
        factor: the factor; None for that of `MARGINS`.

    Raises:
        RopeError: the config has a scheme for which no other factor is known, the factor does not reach the target, or
            the config cannot state the ropes.
    """
    now = _scheme(source)
    if now is not None and not isinstance(now, Llama3 | YaRN | Linear | DynamicNTK):
        must = "the scaling of the config must be one that another factor extends (yarn, llama3, linear or dynamic)"
        fix = f"Its numbers were found for at most {source.length:,} tokens. Choose another model, or train it."
        raise error(source.text.source, must, now.rope_type, fix)
    before = round(source.length / getattr(now, "factor", 1.0))
    least = target / before
    if factor is None:
        factor = math.ceil(100 * MARGINS[method] * least) / 100
    elif factor < least:
        must = f"factor must be at least {least:g}, the target divided by the length before scaling"
        raise error(_WHO, must, f"{factor:g}", "Pass a larger factor, or omit it.")
    known = [i for i, rope in enumerate(source.ropes.layers) if rope is not None]
    far = [i for i in known if (window := source.ropes.window(i)) is None or window > before]
    method, factor = (method, factor) if far else ("none", 1.0)
    refusal = None
    for layers in dict.fromkeys((tuple(far), tuple(known) if far else ())):
        meant = {i: scaled(rope, method, factor, before) for i in layers if (rope := source.ropes.layers[i])}
        try:
            written, whole, ropes = _write(source, target, meant)
            text, _ = ropes_for_engines(whole)
        except RopeError as e:
            refusal = refusal or e
            continue
        if all(_numbers(text.layers[i]) == _numbers(meant.get(i, source.ropes.layers[i])) for i in known):
            return Plan(method, factor, list(layers), ropes, written, whole, text)
    if refusal is not None:
        must = "the config must be one that can be written anew"
        raise error(source.text.source, must, f"that of {source.ropes.model_type}", f"The reason: {refusal}")
    must = f"the config must be able to state {method} for the layers that need it"
    raise error(source.text.source, must, source.ropes.model_type, "Pass another method.")


def linear_note(source: Source, target: int) -> str:
    """Return a sentence about the length of a config with linear scaling, which may be that before the scaling."""
    now = _scheme(source)
    if not isinstance(now, Linear) or source.ropes.model_type.startswith("gemma3"):
        return ""
    reach = round(source.length * now.factor)
    factor = math.ceil(100 * MARGINS["linear"] * target / source.length) / 100
    return (
        f"The {source.length:,} tokens of the config are taken as the length after linear scaling. If the model card "
        f"says that they are the length before it, the model reads {reach:,} tokens, and "
        f"{_checks.argument('factor', factor)} is enough."
    )


def _scheme(source: Source) -> Scaling | None:
    """Return the scheme of the layers that are scaled, or None."""
    return next((rope.scaling for rope in source.text.layers if rope is not None and rope.scaling is not None), None)


def scaled(rope: Rope, method: str, factor: float, before: int) -> Rope:
    """Return a rope with a method. A scheme of this kind keeps its other numbers.

    Args:
        rope: the rope.
        method, factor: as in `Plan`.
        before: the length before scaling, in tokens.
    """
    if isinstance(rope.scaling, Llama3 | YaRN | Linear) and rope.scaling.rope_type == method:
        scheme = dataclasses.replace(rope.scaling, factor=factor)
        # The attention factor of a config is that of its own factor.
        scheme = dataclasses.replace(scheme, attention_factor=None) if isinstance(scheme, YaRN) else scheme
        return dataclasses.replace(rope, scaling=scheme)
    schemes: dict[str, Any] = {
        "llama3": lambda: Llama3(factor, 1.0, 4.0, before),
        "yarn": lambda: YaRN(factor, before),
        "linear": lambda: Linear(factor),
        "dynamic": lambda: DynamicNTK(factor, before),
    }
    if method in schemes:
        return dataclasses.replace(rope, scaling=schemes[method]())
    base = rope.base * factor ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return dataclasses.replace(rope, base=base, scaling=None)


def _numbers(rope: Rope | None) -> object:
    """Return what decides how far a rope rotates text, without the axes, which text does not see."""
    return None if rope is None else (rope.base, rope.scaling, rope.rotary_dim, rope.pairing)


def longer(source: Source, target: int) -> dict[str, Any]:
    """Return the key with which a config allows a length that its ropes reach, for the whole config; {} if it does.

    vLLM and SGLang accept no more than this key, also with YaRN, and multiply it by the factor of other schemes.
    """
    path, text = find_text(source.whole)
    key = next((key for key in LENGTHS if text.get(key)), LENGTHS[0])
    keys = put({}, path, {key: target})
    if target <= source.stated:
        return {}
    try:
        read, _ = ropes_for_engines(put(source.whole, path, {**text, key: target}))
    except RopeError:
        return {}
    return keys if read.layers == source.text.layers else {}


def config_of(source: Source, ropes: ModelRopes, target: int, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the text model with other ropes, in a schema of transformers, and the whole config."""
    written = ropes.to_hf_config(version=version)
    # Dynamic NTK is relative to the stated length. The other schemes state their own, so the target can be allowed.
    if not any(rope is not None and isinstance(rope.scaling, DynamicNTK) for rope in ropes.layers):
        written[next((key for key in LENGTHS if written.get(key)), LENGTHS[0])] = target
    return written, put(source.whole, find_text(source.whole)[0], written)


def _write(source: Source, target: int, meant: Mapping[int, Rope]) -> tuple[dict[str, Any], dict[str, Any], ModelRopes]:
    """Return the configs with other ropes in some layers, and these ropes."""
    layers = tuple(meant.get(i, rope) for i, rope in enumerate(source.ropes.layers))
    ropes = dataclasses.replace(source.ropes, layers=layers)
    try:
        return *config_of(source, ropes, target, 5), ropes
    except RopeError:
        return *config_of(source, ropes, target, 4), ropes
