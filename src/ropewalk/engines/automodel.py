"""The rules of NeMo Automodel, which runs models without a file of its own with the code of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import NO_LENGTH, Answer, Engine, Rounding, Rule, yarn_inside_of_pairs, yarn_magnitude
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.schemes import LongRoPE, PerPair, YaRN

_MODELS = "nemo_automodel/components/models"
_LLAMA, _GPT_OSS, _DEEPSEEK = (f"{_MODELS}/{name}/rope_utils.py" for name in ("llama", "gpt_oss", "deepseek_v3"))
_BY_GPT_OSS = ("glm4_moe", "gpt_oss", "hy_v3", "minimax_m2", "qwen3_moe", "qwen3_next")
"""The model_types that rotate with the class of gpt-oss."""
_BY_DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
"""The model_types that rotate with the functions for DeepSeek."""
_READS = frozenset({"factor", "beta_fast", "beta_slow"})
"""The keys that both read, for every scheme."""


def _gpt_oss(config: ConfigRope, scaling: Any) -> Answer:
    """Return the rope of the class of gpt-oss, which applies YaRN if there is a factor above 1, for every rope_type."""
    section = config.section
    factor = to_finite(section.get("factor"), 1.0)
    trained = to_finite(section.get("original_max_position_embeddings"), 4096.0)
    slow, fast = to_finite(section.get("beta_slow"), 1.0), to_finite(section.get("beta_fast"), 32.0)
    if factor is None or trained is None or slow is None or fast is None:
        return Answer(None, refusal="a number of the scaling is no number, which is not described here", why="unknown")
    if factor <= 1.0:
        dropped = ("Its class applies no scaling without a factor above 1.",) * (scaling is not None)
        return Answer(config.with_scaling(None), notes=dropped, reads=_READS)
    scheme = YaRN(factor, int(trained), beta_fast=fast, beta_slow=slow)
    notes: tuple[str, ...] = ()
    if not isinstance(scaling, YaRN):
        notes = ("Its class applies YaRN for every rope_type with a factor.",)
    elif scaling.truncate:
        notes = ("Its class does not round the ramp.",)
    return replace(yarn_inside_of_pairs(config, scheme, yarn_magnitude(factor), notes), reads=_READS)


def _deepseek(config: ConfigRope, scaling: Any) -> Answer:
    """Return the rope of the function for DeepSeek, which leaves the attention factor to the scale of the softmax."""
    section = config.section
    keys = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    factor, fast, slow, trained = (to_finite(section.get(key)) for key in keys)
    if factor is None or fast is None or slow is None or trained is None:
        note = f"Its function scales nothing without all of {', '.join(keys)}."
        return Answer(config.with_scaling(None), notes=(note,) * (scaling is not None), reads=_READS)
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH, why="unknown")
    if config.longest <= trained:
        note = "Its function scales nothing if max_position_embeddings is not above the trained length."
        return Answer(config.with_scaling(None), notes=(note,), reads=_READS)
    scheme = YaRN(factor, int(trained), beta_fast=fast, beta_slow=slow, attention_factor=1.0)
    own = isinstance(scaling, YaRN)
    notes = () if own else ("Its function applies YaRN for every rope_type with these keys.",)
    return Answer(config.with_scaling(scheme), notes=notes, reads=_READS)


def _dispatch(
    otherwise: Callable[[ConfigRope, Any], Answer] = lambda config, scaling: Answer(config.rope),
) -> Callable[[ConfigRope, Any], Answer]:
    """Return a rule that chooses the function by the model_type."""

    def answer(config: ConfigRope, scaling: Any) -> Answer:
        if config.model_type in _BY_GPT_OSS:
            return _gpt_oss(config, scaling)
        if config.model_type in _BY_DEEPSEEK:
            return _deepseek(config, scaling)
        return otherwise(config, scaling)

    return answer


def _dropped(config: ConfigRope, scaling: Any) -> Answer:
    note = "It computes the frequencies once, without a length, so this scheme scales nothing."
    return Answer(config.with_scaling(None), notes=(note,))


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    note = "It computes the frequencies once, without a length, so the short list is used at every length."
    factor = scaling.at_length(2**31).attention_factor if scaling.short_mscale is None else 1.0
    return Answer(config.with_scaling(PerPair(factors=scaling.short_factor, attention_factor=factor)), notes=(note,))


_FUSED = "With Transformer Engine on a GPU, its fused kernel rotates instead."
_FLOAT32 = Rounding(table="float32", rotation="float32", notes=_FUSED, source=_LLAMA, evidence="run")

AUTOMODEL = Engine(
    name="Automodel",
    version="0.7.0",
    rounding=_FLOAT32,
    rules={
        "default": Rule(_LLAMA, _dispatch()),
        "linear": Rule(_LLAMA, _dispatch()),
        "dynamic": Rule(_LLAMA, _dispatch(_dropped), frozenset({"factor"})),
        "yarn": Rule(_LLAMA, _dispatch()),
        "longrope": Rule(_LLAMA, _dispatch(_longrope), evidence="read"),
        "llama3": Rule(_LLAMA, _dispatch()),
        "proportional": Rule(_LLAMA, _dispatch(), evidence="read"),
    },
    files="automodel",
    lender=TRANSFORMERS,
    unknown="RotaryEmbedding: Unsupported RoPE rope_type (ValueError)",
    models={
        **dict.fromkeys(_BY_GPT_OSS, Rounding(notes=_FUSED, source=_GPT_OSS, evidence="run")),
        **dict.fromkeys(
            _BY_DEEPSEEK, replace(_FLOAT32, computed="float32 powers, divided by the factor", source=_DEEPSEEK)
        ),
    },
)
