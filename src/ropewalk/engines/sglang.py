"""The rules of SGLang, which shares code with vLLM. In LongRoPE, the largest position of a batch decides the list."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import (
    AS_TRANSFORMERS,
    DEEPSEEK,
    DEEPSEEK_YARN,
    MIXED_WINDOWS,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope,
    with_attention_factor,
    yarn_magnitude,
    yarn_with_extrapolation,
)
from ropewalk.engines._override import Override, call, shell
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.engines.vllm import divided, linear, one_position, proportional
from ropewalk.schemes import NTK, DynamicNTK, Linear, LongRoPE, YaRN

_FOLDER = "srt/layers/rotary_embedding"
_FLOAT32 = Rounding(
    table="float32",
    rotation="float32",
    notes="With --rl-on-policy-target it computes inv_freq on the CPU, rounds cos and sin to the dtype of q, and "
    "compiles the rotation.",
    source=f"{_FOLDER}/base.py, kernels/jit/csrc/elementwise/rope.cuh, pos_enc.cuh",
)


_GEMMA_3 = replace(
    _FLOAT32,
    table="the model's",
    notes="On a CPU with AMX it rotates Gemma 3 with another module, which scales nothing.",
    source="srt/models/gemma3_causal.py",
)
_IN_DTYPE_OF_Q = replace(_FLOAT32, table="the model's", rotation="the model's")


def _rounding(config: ConfigRope) -> Rounding:
    """Return how the CUDA kernel rounds. For several axes and other head sizes, there are other kernels.

    In latent attention, only the rotated channels are a head.
    """
    size = config.rope.rotary_dim if config.rope.rotary_offset else config.rope.head_dim
    return _FLOAT32 if size in (64, 128, 256, 512) and not config.several_axes else _IN_DTYPE_OF_Q


def _linear(config: ConfigRope, scaling: Linear) -> Answer:
    return replace(linear(config, scaling), rounding=divided(_rounding(config)))


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    longest = scaling.factor * scaling.max_position_embeddings
    note = f"The base is scaled once, for {longest:,.0f} tokens, even if prompts are short."
    return Answer(config.with_scaling(NTK(alpha=scaling.factor * scaling.factor - (scaling.factor - 1))), notes=(note,))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    times, extrapolation = (to_finite(config.section.get(key), 1.0) for key in ("attn_factor", "extrapolation_factor"))
    if times is None or extrapolation is None or times <= 0.0 or not 0.0 <= extrapolation <= 1.0:
        odd = "attn_factor is not above 0, or extrapolation_factor is not between 0 and 1"
        return Answer(None, refusal=f"{odd}, which is not described here", why="unknown")
    top, bottom = scaling.mscale, scaling.mscale_all_dim
    factor = yarn_magnitude(scaling.factor)
    notes = (f"It multiplies the attention factor of YaRN by attn_factor, {times:g}.",) * (times != 1.0)
    reads = _YARN_KEYS
    if config.model_type in DEEPSEEK or DEEPSEEK_YARN in config.section.values():
        scaling, reads = replace(scaling, truncate=True), _YARN_KEYS - {"truncate"}
        top, bottom = 1.0 if top is None else top, bottom or 0.0
    elif config.several_axes and (top is not None or bottom is not None):
        return Answer(None, refusal="its class for M-RoPE accepts no mscale (TypeError)")
    if top is not None and bottom is not None:
        factor = yarn_magnitude(scaling.factor, top) / yarn_magnitude(scaling.factor, bottom)
        notes += ("It reads mscale and mscale_all_dim if both are given, even if one is 0.",) * (not (top and bottom))
    if extrapolation != 1.0:
        rope = yarn_with_extrapolation(config, scaling, extrapolation, factor * times)
        notes += (f"extrapolation_factor {extrapolation:g} slows the fast pairs as well.",)
        return Answer(rope, notes=notes, reads=reads)
    return Answer(config.with_scaling(with_attention_factor(scaling, factor * times)), notes=notes, reads=reads)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    answer = _LONGROPE(config, scaling)
    if answer.rope is None or not isinstance(scheme := answer.rope.scaling, LongRoPE):
        return answer
    # In a call with length + 1 tokens, all tokens but the last still use the short list.
    length = scaling.original_max_position_embeddings
    attention = None if scheme.short_mscale is not None else scheme.at_length(length).attention_factor
    later = replace(scheme, original_max_position_embeddings=length + 1, attention_factor=attention)
    return replace(answer, rope=config.with_scaling(later))


_LONGROPE = longrope(
    "the call",
    "The list is chosen in each call for the whole batch: one position above {length} switches all sequences to the "
    "long list.",
    "If no position is larger, position {length} itself reads the first row of the long table, so that token is not "
    "rotated.",
    mscales=True,
    only_half=True,
)


_YARN_KEYS = frozenset(
    ["attn_factor", "beta_fast", "beta_slow", "extrapolation_factor", "factor", "mscale", "mscale_all_dim", "truncate"]
)

_LENGTH_AT_TOP = frozenset({"apertus", "arcee", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "mistral"})
_LENGTH_AT_TOP |= {"ministral3"}
"""The model_types whose file takes `original_max_position_embeddings` at the top of the config, as `llama.py` does."""
_OWN_CLASSES = (
    "afmoe bailing_hybrid beam cohere2_moe cosmos3_edge_text deepseek_v2 exaone falcon_h1 granitemoehybrid hy_v4 "
    "internlm2 laguna longcat_flash mellum muse_glimmer_assistant muse_spark_text olmo3 qwen3_5_moe_text qwen3_5_text "
    "qwen3_next qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text "
    "qwen3_vl_text qwen4_exp_text step3p5 zaya"
)
"""The model_types with a class in `srt/configs`, or for which the recorded choice is not that of transformers."""

SGLANG = Engine(
    name="SGLang",
    version="0.5.23",
    rounding=_rounding,
    rules={
        "default": Rule(f"{_FOLDER}/base.py"),
        "linear": Rule(f"{_FOLDER}/base.py", _linear),
        "ntk": Rule(f"{_FOLDER}/rope_variant.py"),
        "dynamic": Rule(f"{_FOLDER}/rope_variant.py", _dynamic),
        "yarn": Rule(f"{_FOLDER}/yarn.py", _yarn, _YARN_KEYS),
        DEEPSEEK_YARN: Rule(f"{_FOLDER}/yarn.py", _yarn, evidence="read"),
        "longrope": Rule(
            f"{_FOLDER}/rope_variant.py",
            _longrope,
            frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"}),
            rounding=_IN_DTYPE_OF_Q,
        ),
        "llama3": Rule(f"{_FOLDER}/rope_variant.py", one_position),
        "proportional": Rule(f"{_FOLDER}/rope_variant.py", proportional, frozenset()),
    },
    files="sglang",
    lender=replace(TRANSFORMERS, models={"gemma3_text": _GEMMA_3}),
    own_length=lambda model_type: model_type not in _LENGTH_AT_TOP,
    own_classes=frozenset(_OWN_CLASSES.split()),
    reads_by_transformers="srt/utils/hf_transformers/config.py",
    without_length=AS_TRANSFORMERS,
    unknown="get_rope: Unknown RoPE scaling type (ValueError)",
    other_class="dual_chunk_attention_config",
    windows=MIXED_WINDOWS,
    override=Override(
        shell("python -m sglang.launch_server --model-path", "--json-model-override-args", "--context-length"),
        "srt/arg_groups/fields/model.py, srt/utils/hf_transformers/config.py",
        merges="at the top",
        deepest=1,
        python=call(
            "sglang.Engine", "json_model_override_args", "context_length", model_argument="model_path=", as_json=True
        ),
    ),
)
