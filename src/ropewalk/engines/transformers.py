"""The rules of transformers, the library for which most configs were written."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import (
    AS_TRANSFORMERS,
    DEEPSEEK_YARN,
    HUNYUAN,
    NO_LENGTH,
    Answer,
    Dtype,
    Engine,
    Rounding,
    Rule,
    dynamic_by_factor,
    longrope_magnitude,
)
from ropewalk.engines._override import Override
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, Scaling, YaRN

_FILE = "modeling_rope_utils.py"
_NO_SUCH = "no such rope_type in ROPE_INIT_FUNCTIONS (KeyError)"
_NO_MSCALES = "its class for this model needs short_mscale and long_mscale (TypeError)"


def _accepted(config: ConfigRope, scaling: Scaling) -> Answer:
    """Return the rope of the config, unless the class of a model for Phi rejects its scheme, which is not LongRoPE."""
    if config.model_type in ("phi3", "phi4_multimodal"):
        return Answer(None, refusal="its class for this model has no scheme but longrope")
    if config.model_type == "phimoe" and not config.section.keys() >= {"short_mscale", "long_mscale"}:
        return Answer(None, refusal=_NO_MSCALES)
    return Answer(config.rope)


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    note = (
        "The length is that of the longest call since the last one within max_position_embeddings, so a long call can "
        "change the rotation of later, shorter ones."
    )
    found = _accepted(config, scaling)
    return found if found.refusal else replace(found, decided_by="the call", notes=(note,))


def _ntk(config: ConfigRope, scaling: NTK) -> Answer:
    if not config.model_type.startswith(HUNYUAN):
        return dynamic_by_factor(config)
    if config.section.get("factor") is None:
        return Answer(None, refusal="it requires factor, although it does not use it (KeyError: 'factor')")
    return Answer(config.rope)


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    renamed = config.model_type == "sarvam_mla" and config.values.get("rope_scaling")
    if DEEPSEEK_YARN in config.section.values() and not renamed:
        return Answer(None, refusal=_NO_SUCH)
    if config.nested and not scaling.truncate:
        note = "It ignores truncate and rounds the ramp if the parameters are nested by the kind of layer."
        return Answer(config.with_scaling(replace(scaling, truncate=True)), notes=(note,))
    return _accepted(config, scaling)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if config.model_type == "phimoe":
        if scaling.short_mscale is None:
            return Answer(None, refusal=_NO_MSCALES)
        note = "PhiMoE uses the short list at every length. Only long_mscale depends on the length."
        rope = config.with_scaling(replace(scaling, long_factor=scaling.short_factor))
        return Answer(rope, "the call", (note,), reads=_PHIMOE_KEYS)
    note = f"The list is chosen in each call: the long one if a position is {length:,} or more."
    if config.model_type in ("phi3", "phi4_multimodal"):
        note += " generate drops the KV cache at that point, because its keys were rotated with the short list."
    if scaling.short_mscale is None:
        return Answer(config.rope, "the call", (note,))
    if scaling.attention_factor is None and scaling.factor is None:
        return Answer(None, refusal="it needs factor or max_position_embeddings to compute the attention factor")
    return Answer(config.with_scaling(replace(scaling, short_mscale=None, long_mscale=None)), "the call", (note,))


# long_factor, because a note says what becomes of it
_PHIMOE_KEYS = frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"})
_LONGROPE_KEYS = frozenset({"short_factor", "long_factor", "factor", "attention_factor"})

_READ = {
    **dict.fromkeys(("deepseek_v4", "esm", "evolla", "hunyuan_vl_text"), ("bfloat16", "float32")),
    **dict.fromkeys(("beam", "deepseek_v2", "ernie4_5_vl_moe_text"), ("float32", "float32")),
}
"""The dtypes of cos and sin and of the rotation in models whose bits were not recorded, for a model in bfloat16."""


@functools.cache
def _recorded() -> Mapping[str, tuple[str, ...]]:
    """Return the same dtypes of the models whose rotated bits were recorded."""
    table = json.loads((Path(__file__).parent / "transformers_rounding.json").read_text(encoding="utf-8"))
    return {name: tuple(dtypes.split()) for dtypes, names in table.items() for name in names}


def _rounding(config: ConfigRope) -> Rounding:
    recorded = _recorded().get(config.model_type)
    dtypes = recorded or _READ.get(config.model_type, ("bfloat16", "bfloat16"))
    table, rotation = (cast(Dtype, "the model's" if dtype == "bfloat16" else dtype) for dtype in dtypes)
    evidence: Literal["run", "read"] = "run" if recorded else "read"
    return Rounding(
        where="CPU",
        table=table,
        rotation=rotation,
        is_complex=config.model_type in ("deepseek_v2", "llama4_text"),
        source="the file of the model",
        evidence=evidence,
    )


def _load(model: str, keys: Mapping[str, Any], tokens: int) -> str:
    """Return the call that loads a model, with keys as arguments. With a nested config, it has another class."""
    is_nested = any(key != "rope_parameters" and isinstance(value, Mapping) for key, value in keys.items())
    words = ", ".join([repr(model), *(f"{key}={value!r}" for key, value in keys.items())])
    return f"AutoModelFor{'MultimodalLM' if is_nested else 'CausalLM'}.from_pretrained({words})"


TRANSFORMERS = Engine(
    name="transformers",
    version="5.24.0",
    rounding=_rounding,
    rules={
        "default": Rule(_FILE),
        "linear": Rule(_FILE, _accepted),
        "ntk": Rule("models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py", _ntk, frozenset({"alpha", "factor"})),
        "dynamic": Rule(_FILE, _dynamic),
        "yarn": Rule(_FILE, _yarn),
        DEEPSEEK_YARN: Rule("models/sarvam_mla/configuration_sarvam_mla.py", _yarn, evidence="read"),
        "longrope": Rule(_FILE, _longrope, _LONGROPE_KEYS),
        "llama3": Rule(_FILE, _accepted),
        "proportional": Rule(_FILE),
        "reversed": Rule("models/nanochat/modeling_nanochat.py", evidence="read"),
    },
    files="transformers",
    reads_by_transformers="configuration_utils.py",
    without_length=AS_TRANSFORMERS,
    unknown=_NO_SUCH,
    override=Override(_load, "configuration_utils.py", merges="nowhere", deepest=1),
)


# Transformers 4, whose configs have the base at the top and the scaling in rope_scaling. Its models ignore
# rope_parameters, and `models_of_transformers_4.json` has the keys that each of them reads.

_FIELDS = {
    **dict.fromkeys(("chameleon", "fuyu", "olmo", "olmo2"), frozenset({"type", "factor"})),
    **dict.fromkeys(("phi3", "phi4_multimodal"), frozenset({"type", "short_factor", "long_factor"})),
}
"""The keys of rope_scaling for the model_types of which the config class accepts no others."""
_OF_HEAD = ("dynamic", "longrope", "ntk", "yarn")
"""The schemes whose functions take head_dim from the config even if it is None."""


def _as_5(config: ConfigRope, scaling: Scaling) -> Answer:
    fields = _FIELDS.get(config.model_type)
    if fields is not None and config.section.keys() != fields:
        said = ", ".join(sorted(fields))
        return Answer(None, refusal=f"its class for this model accepts only the keys {said} (ValueError)")
    if (
        config.model_type in ("minimax", "mixtral")
        and scaling.rope_type in _OF_HEAD
        and not config.values.get("head_dim")
    ):
        return Answer(None, refusal="its class for this model leaves head_dim as None (TypeError)")
    if isinstance(scaling, DynamicNTK) and config.model_type.startswith(HUNYUAN):
        return Answer(None, refusal="it requires alpha for this model (KeyError: 'alpha')")
    if isinstance(scaling, NTK):
        return Answer(config.rope) if config.model_type.startswith(HUNYUAN) else dynamic_by_factor(config)
    return _dynamic(config, scaling) if isinstance(scaling, DynamicNTK) else Answer(config.rope)


def _longrope_4(config: ConfigRope, scaling: LongRoPE) -> Answer:
    """Return the rope by the trained length at the top of the config. It reads no other, and no mscale."""
    if (answer := _as_5(config, scaling)).refusal:
        return answer
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH)
    default = 4096.0 if config.model_type in _FIELDS else None  # that of the classes for Phi
    trained = to_finite(config.values.get("original_max_position_embeddings"), default)
    factor, attention = (to_finite(config.section.get(key)) for key in ("factor", "attention_factor"))
    length = int(trained or config.longest)
    longest = config.longest if trained is not None else None if factor is None else int(factor * length)
    attention = longrope_magnitude(longest, length) if attention is None else attention
    if attention is None:
        return Answer(None, refusal="it needs factor or original_max_position_embeddings at the top (TypeError)")
    scheme = replace(
        scaling,
        original_max_position_embeddings=length,
        attention_factor=attention,
        factor=None,
        short_mscale=None,
        long_mscale=None,
    )
    note = f"The list is chosen in each call: the long one if a position is {length:,} or more."
    return Answer(config.with_scaling(scheme), "the call", (note,))


def _rounding_4(config: ConfigRope) -> Rounding:
    return replace(_rounding(config), evidence="read")


TRANSFORMERS_4 = replace(
    TRANSFORMERS,
    name="transformers-4",
    version="4.57.6",
    rounding=_rounding_4,
    rules={
        **{name: Rule(_FILE, _as_5) for name in ("linear", "dynamic", "yarn", "llama3")},
        "default": Rule(_FILE),
        "ntk": Rule("models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py", _as_5, frozenset({"alpha", "factor"})),
        "longrope": Rule(_FILE, _longrope_4, _LONGROPE_KEYS),
    },
    models={"modernbert-decoder": Rounding(where="CPU", source="the file of the model")},
    files="transformers_4",
    reads_by_transformers="",
    precedence=True,
    override=None,
)


def lost_in_4(config: ConfigRope) -> bool:
    """Whether only a key states the rope that transformers 4 does not read, and what it computes instead is known."""
    stated = {key for key in ("rope_parameters", "rope_scaling", "rope_theta") if config.values.get(key) is not None}
    return stated == {"rope_parameters"} and TRANSFORMERS_4.answer(config).is_judged
