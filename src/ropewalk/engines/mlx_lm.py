"""mlx-lm: frequencies as periods, the attention factor on q and k, and the long list of LongRoPE always."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import (
    NO_LENGTH,
    Answer,
    Asked,
    Engine,
    Rule,
    as_read,
    dynamic_by_factor,
    longrope_magnitude,
    magnitude,
    with_attention,
)
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, PerPair, YaRN

_FILE = "models/rope_utils.py"
_HUNYUAN = ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
_TAKES_SU = ("phi3", "phimoe", "minicpm3")


def _ntk(asked: Asked, scaling: NTK) -> Answer:
    if asked.model_type in _HUNYUAN:
        return Answer(asked.rope)
    return dynamic_by_factor(asked)


def _dynamic(asked: Asked, scaling: DynamicNTK) -> Answer:
    note = "The length is that of the cache and the call; keys in the cache keep the rotation of their own length."
    return Answer(asked.rope, "the call", (note,))


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    scaling = replace(scaling, truncate=True)
    top = 1.0 if scaling.mscale is None else scaling.mscale
    factor = magnitude(scaling.factor, top) / magnitude(scaling.factor, scaling.mscale_all_dim or 0.0)
    alone = (scaling.mscale is None) is not (scaling.mscale_all_dim is None)
    note = ("One of mscale and mscale_all_dim counts alone; the other is then 1 and 0.",) if alone else ()
    return Answer(asked.scaled(with_attention(scaling, factor)), notes=note)


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    factor = longrope_magnitude(asked.longest, scaling.original_max_position_embeddings)
    if asked.model_type == "phimoe" and scaling.long_mscale is not None:
        factor = scaling.long_mscale
    if factor is None:
        return Answer(None, refused=NO_LENGTH)
    rope = asked.scaled(PerPair(factors=scaling.long_factor, attention_factor=factor))
    if asked.stated.get("type", asked.stated.get("rope_type")) == "su" and asked.model_type not in _TAKES_SU:
        return Answer(None, refused="Unsupported RoPE type su (ValueError)")
    if asked.rope.pairing != "half":
        return Answer(None, refused="its class rotates the pairing half only")
    return Answer(rope, notes=("The long list holds at every length; short_factor is not used.",))


MLX_LM = Engine(
    name="mlx-lm",
    version="0.32.2",
    table="No table: angles are float32 in mx.fast.rope; the attention factor multiplies q and k in their dtype.",
    rules={
        "default": Rule(_FILE, frozenset(), as_read),
        "linear": Rule(_FILE, frozenset({"factor"}), as_read),
        "ntk": Rule("models/hunyuan_v1_dense.py, models/rope_utils.py", frozenset({"alpha", "factor"}), _ntk),
        "dynamic": Rule(_FILE, frozenset({"factor"}), _dynamic),
        "yarn": Rule(_FILE, frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}), _yarn),
        # short_factor is read, and the rule says in a sentence of its own that it is not used.
        "longrope": Rule(_FILE, frozenset({"short_factor", "long_factor"}), _longrope),
        "llama3": Rule(_FILE, frozenset({"factor", "low_freq_factor", "high_freq_factor"}), as_read),
        "proportional": Rule(_FILE, frozenset({"factor"}), as_read),
    },
    unknown="initialize_rope: Unsupported RoPE type (ValueError)",
)
