"""Choose a scheme and a factor with which a model reads a longer text than its config states, and write that config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ropewalk import _checks
from ropewalk._checks import RopeError, error
from ropewalk.configs.engine_ropes import find_engine_keys, ropes_for_engines
from ropewalk.configs.hf import find_text, text_path
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import read_config
from ropewalk.engines import ConfigRope, put
from ropewalk.rope.rope import Rope
from ropewalk.schemes import NTK, DynamicNTK, Linear, Llama3, Scaling, YaRN
from ropewalk.tools.diff.for_engine import LENGTHS
from ropewalk.tools.diff.lengths import stated_length

METHODS: dict[str, Callable[[float, int], Scaling] | None] = {
    "llama3": lambda factor, length: Llama3(factor, 1.0, 4.0, length),
    "yarn": YaRN,
    "linear": lambda factor, _: Linear(factor),
    "ntk": None,
    "dynamic": DynamicNTK,
}
"""The schemes of the methods, from the factor and the length before scaling; None for a larger base."""

MARGIN = 2.0
"""By which a factor exceeds target / length before scaling, if nobody measured the model (docs/extend.md)."""

# (model_type, trained length in tokens) → the models whose authors recommend YaRN with the ratio of the lengths.
_RECOMMENDED = {
    ("qwen2", 32_768): "Qwen2.5",
    **dict.fromkeys((("qwen3", 32_768), ("qwen3_moe", 32_768)), "Qwen3"),
    ("qwen3_moe", 262_144): "Qwen3-Coder",
    ("qwen3_next", 262_144): "Qwen3-Next",
    **dict.fromkeys((("qwen3_5", 262_144), ("qwen3_5_moe", 262_144)), "Qwen3.5"),
    ("smollm3", 65_536): "SmolLM3",
    **dict.fromkeys((("bailing_moe", 32_768), ("bailing_moe_v2", 32_768)), "Ling 2.0"),
}
_FARTHEST = 4.0  # the largest factor that they recommend


def recommended(source: Source, target: int, original: int | None) -> str:
    """Return the models whose authors recommend YaRN with the ratio of the lengths for such a config, or ""."""
    before = original or source.text.trained_length or source.length
    is_near = scheme_of(source.text) is None and target <= _FARTHEST * before
    return _RECOMMENDED.get((source.ropes.model_type.removesuffix("_text"), before), "") if is_near else ""


def scheme_of(ropes: ModelRopes) -> Scaling | None:
    """Return the scheme of the layers that are scaled, or None."""
    return next((rope.scaling for rope in ropes.layers if rope is not None and rope.scaling is not None), None)


def method_of(scheme: Scaling | None) -> str:
    """Return the method that makes such a scheme; "" for no scheme and for one whose numbers belong to its length."""
    made = {name: type(scheme_from(1.0, 1)) for name, scheme_from in METHODS.items() if scheme_from}
    return next((name for name, own in made.items() if own is type(scheme)), "")


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
        asked: the arguments `pairing` and `base` of `from_config`, if the whole config needs them.
    """

    ropes: ModelRopes
    text: ModelRopes
    configs: list[tuple[ConfigRope, list[int]]]
    whole: Mapping[str, Any]
    length: int
    stated: int
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A method with its factor, and the config with it.

    Args:
        method: a key of `METHODS`, or "none" if no layer that rotates sees farther than its window.
        factor: the factor of its scheme, or by which "ntk" slows the slowest pair; dimensionless.
        layers: the indices of the layers that it changes.
        ropes: the ropes of the text model, with their axes.
        written: the config of the text model in the schema of transformers 5, or of 4 if its code reads only that.
        text: the ropes of text tokens that it states.
    """

    method: str
    factor: float
    layers: list[int]
    ropes: ModelRopes
    written: Mapping[str, Any]
    text: ModelRopes


def read_source(config: Any, **options: Any) -> Source:
    """Read a config for `make`, with the options of `from_config`.

    Raises:
        RopeError: the config cannot be read, or states no length.
    """
    text, configs = ropes_for_engines(config, **options)
    length = stated_length(text)
    if length is None:
        fix = "Add max_position_embeddings to the file: the length that the model was trained for, as its card says."
        raise error(text.source, "the config must state a length in tokens", "none", fix)
    longest, trained = text.max_position_embeddings, text.trained_length
    if longest and trained and scheme_of(text) and trained < longest and length <= 1.01 * MARGIN * longest:
        length = longest  # what its factor, with a margin, was chosen for
    whole = configs[0][0].whole if configs else text.config or {}  # without the keys to ignore
    needed = () if text.file_format else ("pairing", "base")  # a converted config states both
    asked: dict[str, Any] = {key: options[key] for key in needed if options.get(key) is not None}
    ropes = read_config(whole, ignore=find_engine_keys(whole), **asked)
    return Source(ropes, text, configs, whole, length, text.max_position_embeddings or length, asked)


def methods(source: Source, target: int, original: int | None) -> list[str]:
    """Return the methods to try if none is asked for, the best first: that of the config or of its authors, or two."""
    if recommended(source, target, original):
        return ["yarn"]
    now = method_of(scheme_of(source.text))
    if now and all(rope is None or rope.is_static for rope in source.text.layers):
        return [now]
    # Engines divide the pairs among axes without a scheme and with YaRN, and not with Llama 3's scheme.
    return ["yarn"] if any(rope is not None and rope.axes for rope in source.ropes.layers) else ["llama3", "yarn"]


def make(source: Source, target: int, method: str, factor: float | None, original: int | None = None) -> Plan:
    """Return the config with a method.

    Args:
        source: the config.
        target: the length to reach, in tokens.
        method: a key of `METHODS`.
        factor: the factor; None for the rule.
        original: the length before scaling, in tokens; None for that of the config.

    Raises:
        RopeError: the config has a scheme for which no other factor is known, the factor does not reach the target, or
            the config cannot state the ropes.
    """
    now = scheme_of(source.text)
    if now is not None and not method_of(now):
        key = next(iter(_lengths(find_text(source.whole)[1], target)))
        fix = f"If the model card states more than its {source.length:,} tokens, write that as {key} into the config"
        fix += f" (llama.cpp: --override-kv <general.architecture>.context_length=int:{target})."
        raise error(source.text.source, "the scaling must be one that another factor extends", now.rope_type, fix)
    trained = source.text.trained_length or 0
    before = original or (trained if 0 < trained < source.stated else source.length)
    before_scaling = max(round(source.length / getattr(now, "factor", 1.0)), trained)  # its factor may have a margin
    if original is None and not hides_original(source):
        before = before if now is None else before_scaling
    elif original is None and (factor is None or method != "linear"):
        said = f"since the {source.length:,} tokens of the config may be those before linear scaling"
        first, second = (_checks.argument("original", tokens) for tokens in (source.length, before_scaling))
        fix = f"Pass {first} if the model card says that they are, and {second} if they are those after it."
        raise error(source.text.source, f"{_checks.option('original')} must be given, {said}", "none", fix)
    if factor is None:
        is_known = method == "yarn" and recommended(source, target, original)
        factor = math.ceil(100 * (1.0 if is_known else MARGIN) * target / before) / 100
    elif factor < (least := target / before):
        must = f"{_checks.option('new_factor')} must be at least {least:g}, the target / the length before scaling"
        raise error("ropewalk extend", must, f"{factor:g}", "Pass a larger factor, or omit it.")
    known = [i for i, rope in enumerate(source.ropes.layers) if rope is not None]
    far = [i for i in known if (window := source.ropes.window(i)) is None or window > before]
    method, factor = (method, factor) if far else ("none", 1.0)
    refusal = None
    for layers in dict.fromkeys((tuple(far), tuple(known) if far else ())):
        meant = {i: scaled(rope, method, factor, before) for i in layers if (rope := source.ropes.layers[i])}
        new = tuple(meant.get(i, rope) for i, rope in enumerate(source.ropes.layers))
        ropes = dataclasses.replace(source.ropes, layers=new)
        try:
            written, whole = config_of(source, ropes, target)
            text, _ = ropes_for_engines(whole)
        except RopeError as e:
            refusal = refusal or e
            continue
        if all(_numbers(one) == _numbers(other) for one, other in zip(text.layers, new, strict=True)):
            return Plan(method, factor, list(layers), ropes, written, text)
    if refusal is not None:
        must = "the config must be one that can be written anew"
        raise error(source.text.source, must, f"that of {source.ropes.model_type}", f"The reason: {refusal}")
    must = f"the config must be able to state {method} for the layers that need it"
    raise error(source.text.source, must, source.ropes.model_type, "Pass another method.")


def hides_original(source: Source) -> bool:
    """Return whether the length of a config may be that before or after scaling. Gemma 3 states that after it."""
    return method_of(scheme_of(source.text)) == "linear" and not source.ropes.model_type.startswith("gemma3")


def length_notes(source: Source, target: int, asked: float | None) -> list[str]:
    """Return a sentence about a factor that was chosen with a margin for the length that the config states."""
    now = scheme_of(source.text)
    if asked is None and now and method_of(now) and source.length < target <= (stated_length(source.text) or 0):
        enough = _checks.argument("new_factor", getattr(now, "factor", 1.0))
        return [f"If the model card recommends the factor of the config for {target:,} tokens, {enough} is enough."]
    return []


def scaled(rope: Rope, method: str, factor: float, before: int) -> Rope:
    """Return a rope with a method. A scheme of this kind keeps its other numbers.

    Args:
        rope: the rope.
        method, factor: as in `Plan`.
        before: the length before scaling, in tokens.
    """
    if method_of(rope.scaling) == method and rope.is_static:
        # The attention factor of a config is that of its own factor.
        new: Any = {"attention_factor": None} if hasattr(rope.scaling, "attention_factor") else {}
        return dataclasses.replace(rope, scaling=dataclasses.replace(cast(Any, rope.scaling), factor=factor, **new))
    if (scheme_from := METHODS[method]) is not None:
        return dataclasses.replace(rope, scaling=scheme_from(factor, before))
    return dataclasses.replace(rope, base=NTK(factor).as_base(rope.base, rope.rotary_dim), scaling=None)


def _numbers(rope: Rope | None) -> object:
    """Return what decides how far a rope rotates text, without the axes, which text does not see."""
    return None if rope is None else (rope.base, rope.scaling, rope.rotary_dim, rope.pairing)


def longer(source: Source, target: int) -> dict[str, Any]:
    """Return the key with which a config allows a length that its ropes reach, for the whole config; {} if it does.

    vLLM and SGLang accept no more than this key, also with YaRN, and multiply it by the factor of other schemes.
    """
    if target <= source.stated:
        return {}
    path, text = find_text(source.whole)
    length = _lengths(text, target)
    try:
        read, _ = ropes_for_engines(put(source.whole, path, {**text, **length}), **source.asked)
    except RopeError:
        return {}
    return put({}, text_path(source.whole), length) if read.layers == source.text.layers else {}


def _lengths(text: Mapping[str, Any], target: int) -> dict[str, int]:
    """Return the keys with which the config of a text model allows a length: the first one, and each that limits it."""
    first = next((key for key in LENGTHS if text.get(key)), LENGTHS[0])
    return {key: target for key in LENGTHS if key == first or (type(text.get(key)) is int and text[key] < target)}


def version_of(source: Source) -> int:
    """Return the version of transformers whose schema the file has, 4 or 5."""
    return 5 if "rope_parameters" in find_text(source.whole)[1] else 4


def config_of(
    source: Source, ropes: ModelRopes, target: int, version: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the text model with other ropes, and the whole config, in a schema of transformers.

    By default this is that of transformers 5, or of 4 if the model's own code reads only that.
    """
    try:
        written = ropes.to_hf_config(version=version or 5)
    except RopeError:
        if version is not None:
            raise
        written = ropes.to_hf_config(version=4)
    # A scheme that depends on the length is relative to the stated one. The others state their own.
    if all(rope is None or rope.is_static for rope in ropes.layers):
        written |= _lengths(written, target)
    return written, put(source.whole, find_text(source.whole)[0], written)
