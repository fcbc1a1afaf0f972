"""transformers: the code that most configs were written for."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import (
    HUNYUAN,
    Answer,
    Asked,
    Engine,
    Rule,
    as_read,
    dynamic_by_factor,
)
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, YaRN

_FILE = "modeling_rope_utils.py"


def _dynamic(asked: Asked, scaling: DynamicNTK) -> Answer:
    note = (
        "The length is that of the longest call since the last one within max_position_embeddings, so the same tokens "
        "may be rotated otherwise after a long call."
    )
    return Answer(asked.rope, "the call", (note,))


def _ntk(asked: Asked, scaling: NTK) -> Answer:
    if not asked.model_type.startswith(HUNYUAN):
        return dynamic_by_factor(asked)
    if asked.stated.get("factor") is None:
        return Answer(None, refused="it needs factor, which it does not use (KeyError: 'factor')")
    return Answer(asked.rope)


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    if asked.nested and not scaling.truncate:
        note = "It ignores truncate where the parameters are nested by the kind of layer, and rounds the ramp."
        return Answer(asked.scaled(replace(scaling, truncate=True)), notes=(note,))
    return Answer(asked.rope)


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if asked.model_type == "phimoe":
        note = "PhiMoE keeps the short list at every length; only long_mscale takes effect."
        return Answer(asked.scaled(replace(scaling, long_factor=scaling.short_factor)), "the call", (note,))
    note = (
        f"The list is chosen in each call: the long one as soon as a position is {length:,} or more. Phi-3's generate "
        "drops the KV cache there, since the keys in it were rotated with the short one."
    )
    if scaling.short_mscale is None:
        return Answer(asked.rope, "the call", (note,))
    if scaling.attention_factor is None and scaling.factor is None:
        return Answer(None, refused="it needs factor or max_position_embeddings for the attention factor")
    return Answer(asked.scaled(replace(scaling, short_mscale=None, long_mscale=None)), "the call", (note,))


_LONGROPE_KEYS = frozenset({"short_factor", "long_factor", "factor", "attention_factor"})
_YARN_KEYS = frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})

TRANSFORMERS = Engine(
    name="transformers",
    version="5.23.0",
    table="Angles are float32 products; cos and sin are rounded to the dtype of the model, but for a few models.",
    rules={
        "default": Rule(_FILE, frozenset(), as_read),
        "linear": Rule(_FILE, frozenset({"factor"}), as_read),
        "ntk": Rule("models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py", frozenset({"alpha", "factor"}), _ntk),
        "dynamic": Rule(_FILE, frozenset({"factor"}), _dynamic),
        "yarn": Rule(_FILE, _YARN_KEYS, _yarn),
        "longrope": Rule(_FILE, _LONGROPE_KEYS, _longrope),
        "llama3": Rule(_FILE, frozenset({"factor", "low_freq_factor", "high_freq_factor"}), as_read),
        "proportional": Rule(_FILE, frozenset({"factor"}), as_read),
    },
    unknown="no such rope_type in ROPE_INIT_FUNCTIONS (KeyError)",
)
