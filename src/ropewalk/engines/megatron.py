"""The rules of Megatron: what Megatron-Bridge makes of a config, and the rotary classes of megatron-core.

The versions are Megatron-Bridge 0.6.2 and megatron-core 0.19.2. The bridge of a model copies some keys of the config. A
scaling for which it has no lines is dropped without a warning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import MSCALE_KEYS, Answer, Engine, Rounding, Rule, with_attention_factor, yarn_magnitude
from ropewalk.schemes import Linear, Llama3, PerPair, YaRN

_EMBEDDINGS = "megatron/core/models/common/embeddings"
_BRIDGE = "megatron/bridge/models/conversion/model_bridge.py"
_YARN = f"{_EMBEDDINGS}/yarn_rotary_pos_embedding.py"

_MLA = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
"""The model_types with multi-latent attention, whose layers build the rotary class of YaRN themselves."""
_FACTOR_ONLY = ("minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "ernie4_5_moe", "exaone4")
"""The model_types whose bridge selects the class without scaling after it copied the keys of YaRN."""
_LINEAR = ("gemma3_text", "gemma3")
"""The model_types whose bridge divides the frequencies by the factor of any scheme."""
_LLAMA3 = ("exaone_moe",)
"""The model_types whose bridge applies Llama 3's scaling with the factor of any scheme."""


def _any_scheme(config: ConfigRope, scaling: Any) -> Answer | None:
    """Return the answer for a model whose bridge does not look at the rope_type, else None."""
    if config.model_type == "gpt_oss":
        rope = config.with_scaling(YaRN(32.0, 4096, truncate=False))
        note = "The bridge of gpt-oss sets every number of YaRN itself: factor 32 and 4,096 tokens."
        return Answer(rope, notes=(note,), reads=frozenset())
    factor = to_finite(config.section.get("factor"))
    if scaling is None or factor is None or config.model_type not in (*_LINEAR, *_LLAMA3):
        return None
    scheme = Linear(factor) if config.model_type in _LINEAR else _llama3_scheme(factor)
    note = (f"Its bridge applies {scheme.rope_type} scaling for every rope_type.",) * (
        scheme.rope_type != scaling.rope_type
    )
    return Answer(config.with_scaling(scheme), notes=note, reads=frozenset({"factor"}))


def _default(config: ConfigRope, scaling: None) -> Answer:
    return _any_scheme(config, scaling) or Answer(config.rope)


def _dropped(config: ConfigRope, scaling: Any) -> Answer:
    own = scaling.rope_type == "proportional" and config.model_type.startswith("gemma4")  # in modeling_gemma4.py
    notes = ("A bridge without lines for this scheme drops it without a warning.",) * (not own)
    return _any_scheme(config, scaling) or Answer(config.rope if own else config.with_scaling(None), notes=notes)


def _linear(config: ConfigRope, scaling: Linear) -> Answer:
    rounding = replace(_FUSED, computed="float32 powers, multiplied by positions times 1 / factor")
    return _any_scheme(config, scaling) or Answer(config.rope, rounding=rounding)


def _llama3_scheme(factor: float) -> Llama3:
    return Llama3(factor, 1.0, 4.0, 8192)


def _llama3(config: ConfigRope, scaling: Llama3) -> Answer:
    if (found := _any_scheme(config, scaling)) is not None:
        return found
    scheme = _llama3_scheme(scaling.factor)
    fixed = "megatron-core reads only the factor. It uses the factors 1 and 4 of the frequencies, and 8,192 tokens."
    return Answer(config.with_scaling(scheme), notes=(fixed,) * (scheme != scaling))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    if (found := _any_scheme(config, scaling)) is not None:
        return found
    section = config.section
    top, bottom = (to_finite(section.get(key)) for key in ("mscale", "mscale_all_dim"))
    if config.model_type in _MLA:
        top, bottom = 1.0 if top is None else top, bottom or 0.0
        scaling = replace(scaling, truncate=True)
    factor = yarn_magnitude(scaling.factor)
    if top is not None and bottom is not None:
        factor = yarn_magnitude(scaling.factor, top) / yarn_magnitude(scaling.factor, bottom)
    if config.model_type in _MLA:
        return Answer(config.with_scaling(with_attention_factor(scaling, factor)), reads=MSCALE_KEYS)
    if config.model_type in _FACTOR_ONLY:
        note = "Its bridge does not scale the frequencies, but the attention factor of YaRN is applied."
        rope = config.with_scaling(PerPair(factors=(1.0,) * (config.rope.rotary_dim // 2), attention_factor=factor))
        return Answer(rope, notes=(note,), reads=frozenset({"factor", "mscale", "mscale_all_dim"}))
    if config.rope.rotary_offset:
        return Answer(None, refusal="how it rotates the last channels of a head was not recorded", why="unknown")
    missing = [key for key in ("beta_fast", "beta_slow") if section.get(key) is None]
    if missing:
        return Answer(None, refusal=f"it needs {' and '.join(missing)} in the scaling (TypeError: NoneType)")
    truncate = bool(section.get("truncate"))
    notes = ("Its bridge has no default for truncate, so the ramp is not rounded.",) * (truncate != scaling.truncate)
    scaling = replace(scaling, truncate=truncate)
    rope = replace(config.rope, rotary_dim=config.rope.head_dim)
    notes += ("Its class of YaRN rotates the whole head.",) * (rope != config.rope)
    rope = replace(rope, scaling=with_attention_factor(scaling, factor))
    return Answer(rope, notes=notes, rounding=_UNFUSED)  # apply_rope_fusion is switched off for this class


_UNFUSED = Rounding(source=f"{_EMBEDDINGS}/rope_utils.py", evidence="run")
_FUSED = replace(
    _UNFUSED,
    table="float32",
    rotation="float32",
    notes="Its bridge sets apply_rope_fusion, so Transformer Engine rotates.",
    evidence="read",
    source="megatron/core/extensions/transformer_engine.py, transformer_engine/common/fused_rope/fused_rope.cu",
)

MEGATRON = Engine(
    name="Megatron-Bridge",
    version="0.6.2",
    rounding=_UNFUSED,
    rules={
        "default": Rule(f"{_EMBEDDINGS}/rotary_pos_embedding.py", _default),
        "linear": Rule(f"{_EMBEDDINGS}/rotary_pos_embedding.py", _linear, frozenset({"factor"})),
        "ntk": Rule(_BRIDGE, _dropped, frozenset({"alpha", "factor"}), evidence="read"),
        "dynamic": Rule(_BRIDGE, _dropped, frozenset({"factor"})),
        "yarn": Rule(_YARN, _yarn, MSCALE_KEYS | {"truncate"}),
        "longrope": Rule(_BRIDGE, _dropped, frozenset()),
        "llama3": Rule(f"{_EMBEDDINGS}/rotary_pos_embedding.py", _llama3),
        "proportional": Rule(_BRIDGE, _dropped, frozenset(), evidence="read"),
    },
    files="megatron",
    unknown="no bridge has lines for this scheme",
    models=dict.fromkeys(("llama", "nemotron"), _FUSED),
)
