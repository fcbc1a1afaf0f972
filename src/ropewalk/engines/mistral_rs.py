"""The rules of mistral.rs, where each model has a struct of its own for the keys of config.json.

All was read, at 9e922623f in EricLBuehler/mistral.rs: in mistralrs-core/src the files of the table, `layers.rs`,
`pipeline/loaders`, which choose the pairing, `pipeline/inputs_processor.rs`, which counts the tokens by which Phi
chooses its list, and `cuda/attention_prep.cu`, and in mistralrs-quant `src/rotary` and `kernels/rotary`. Not looked up:
GGUF files, and models that are not in the table. No test compares the rules with the engine, but mistralrs 0.9.5 gave
small random models of 12 model_types the log-probabilities that they predict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import (
    MSCALE_KEYS,
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope_magnitude,
    with_attention_factor,
    with_mscales,
    yarn_magnitude,
)
from ropewalk.schemes import LongRoPE, Proportional, YaRN

_FILE = "layers.rs"
_SCHEMES = {
    **dict.fromkeys(("llama", "smollm3"), ("linear", "llama3")),
    "gemma3_text": ("linear",),
    "gemma4_text": ("proportional",),
    **dict.fromkeys(("phi3", "phimoe"), ("longrope",)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "gpt_oss", "ministral3", "mistral"), ("yarn",)),
}
"""Maps a model_type whose struct has the scaling to the schemes that it accepts."""

_UNKNOWN = "its struct for this model has no such scheme (an error of serde or candle)"


def _answer(config: ConfigRope, scaling: Any) -> Answer:
    """Return the rope of the struct of the model."""
    schemes = _SCHEMES.get(config.model_type)
    if schemes is None:
        said = "which schemes its file for this model has, if it has one, was not looked up"
        return Answer(None, refusal=said, why="unknown")
    if scaling.rope_type not in schemes:
        return Answer(None, refusal=_UNKNOWN)
    if isinstance(scaling, YaRN):
        return _yarn(config, scaling)
    if isinstance(scaling, LongRoPE):
        return _longrope(config, scaling)
    if isinstance(scaling, Proportional):
        share = config.section.get("partial_rotary_factor", 0.25)
        return Answer(config.with_scaling(replace(scaling, partial_rotary_factor=share, factor=1.0)))
    return Answer(config.rope)


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    if config.model_type == "gpt_oss":
        scaling = replace(scaling, truncate=config.section.get("truncate") is True, mscale=None, mscale_all_dim=None)
        scaling = with_attention_factor(scaling, yarn_magnitude(scaling.factor))
        return Answer(config.with_scaling(scaling), reads=frozenset({"factor", "beta_fast", "beta_slow", "truncate"}))
    keys = ("mscale", "mscale_all_dim") if config.model_type.startswith("deepseek") else ()
    if missing := [key for key in ("beta_fast", "beta_slow", *keys) if config.section.get(key) is None]:
        return Answer(None, refusal=f"it needs {', '.join(missing)} in the scaling")
    return Answer(config.with_scaling(with_mscales(scaling)))


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    factor = longrope_magnitude(config.longest, length)
    if factor is None:
        return Answer(None, refusal=NO_LENGTH)
    # position_ids has the length of each sequence, to which another 1 is added.
    scheme = replace(
        scaling,
        original_max_position_embeddings=length - 1,
        attention_factor=factor,
        short_mscale=None,
        long_mscale=None,
    )
    note = f"A sequence of {length:,} tokens or more switches all sequences in its batch to the long list."
    return Answer(config.with_scaling(scheme), "the call", (note,))


_RULE = Rule(_FILE, _answer, evidence="read")
_ROUNDING = Rounding(
    computed="float32 or float64 powers of Rust",
    where="CPU",
    notes="How CUDA's compiler fuses the products of its 16-bit kernel was not looked up.",
    source=f"{_FILE}, mistralrs-quant/kernels/rotary/rotary.cu",
)
_FUSED = replace(
    _ROUNDING,
    rotation="float32",
    notes="On CUDA, one kernel computes the norms of q and k and rotates.",
    source=f"{_FILE}, cuda/attention_prep.cu",
)

MISTRAL_RS = Engine(
    name="mistral.rs",
    version="9e922623f",
    rounding=_ROUNDING,
    rules={
        "default": Rule(_FILE, evidence="read"),
        **dict.fromkeys(("linear", "ntk", "dynamic", "llama3"), _RULE),
        "yarn": replace(_RULE, reads=MSCALE_KEYS),
        "longrope": replace(_RULE, reads=frozenset({"short_factor", "long_factor"})),
        "proportional": replace(_RULE, reads=frozenset()),
    },
    files="mistral_rs",
    unknown=_UNKNOWN,
    models=dict.fromkeys(("gemma3_text", "gemma4_text", "glm4_moe", "qwen3", "qwen3_moe"), _FUSED),
)
