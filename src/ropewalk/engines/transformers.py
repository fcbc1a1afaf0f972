"""The rules of transformers, the library for which most configs were written."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import (
    AS_TRANSFORMERS,
    HUNYUAN,
    Answer,
    Dtype,
    Engine,
    Rounding,
    Rule,
    dynamic_by_factor,
)
from ropewalk.engines._override import Override, call
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, YaRN

_FILE = "modeling_rope_utils.py"


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    note = (
        "The length is that of the longest call since the last one within max_position_embeddings, so a long call can "
        "change the rotation of later, shorter ones."
    )
    return Answer(config.rope, "the call", (note,))


def _ntk(config: ConfigRope, scaling: NTK) -> Answer:
    if not config.model_type.startswith(HUNYUAN):
        return dynamic_by_factor(config)
    if config.section.get("factor") is None:
        return Answer(None, refusal="it requires factor, although it does not use it (KeyError: 'factor')")
    return Answer(config.rope)


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    if config.nested and not scaling.truncate:
        note = "It ignores truncate and rounds the ramp if the parameters are nested by the kind of layer."
        return Answer(config.with_scaling(replace(scaling, truncate=True)), notes=(note,))
    return Answer(config.rope)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if config.model_type == "phimoe":
        if scaling.short_mscale is None:
            return Answer(None, refusal="its class for this model needs short_mscale and long_mscale (TypeError)")
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


TRANSFORMERS = Engine(
    name="transformers",
    version="5.24.0",
    rounding=_rounding,
    rules={
        "default": Rule(_FILE),
        "linear": Rule(_FILE),
        "ntk": Rule("models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py", _ntk, frozenset({"alpha", "factor"})),
        "dynamic": Rule(_FILE, _dynamic),
        "yarn": Rule(_FILE, _yarn),
        "longrope": Rule(_FILE, _longrope, _LONGROPE_KEYS),
        "llama3": Rule(_FILE),
        "proportional": Rule(_FILE),
        "reversed": Rule("models/nanochat/modeling_nanochat.py", evidence="read"),
    },
    files="transformers",
    reads_by_transformers="configuration_utils.py",
    without_length=AS_TRANSFORMERS,
    unknown="no such rope_type in ROPE_INIT_FUNCTIONS (KeyError)",
    override=Override(
        call("AutoModelForCausalLM.from_pretrained", "", ""),
        "configuration_utils.py",
        merges="nowhere",
        deepest=1,
    ),
)
