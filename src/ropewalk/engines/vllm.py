"""The rules of vLLM, which computes all frequencies when the engine starts, for the length max_model_len."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import (
    AS_TRANSFORMERS,
    DEEPSEEK,
    DEEPSEEK_YARN,
    MSCALE_KEYS,
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope,
    with_mscales,
)
from ropewalk.engines._override import Override, call, shell
from ropewalk.engines.transformers import TRANSFORMERS
from ropewalk.schemes import NTK, DynamicNTK, Linear, Proportional, Scaling, YaRN

if TYPE_CHECKING:
    from ropewalk.schemes import TeleChat3

_FOLDER = "model_executor/layers/rotary_embedding"
_TELECHAT3_KEYS = frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"})
_INTEGER = "it fails if factor is an integer (TypeError: 'int' object is not iterable)"


# Inductor compiles the rotation by default, and computes it in float32 as the CUDA kernel does.
_ROUNDING = Rounding(rotation="float32", source=f"{_FOLDER}/base.py, csrc/libtorch_stable/pos_encoding_kernels.cu")


def divided(rounding: Rounding) -> Rounding:
    """Return the rounding of linear scaling in vLLM and SGLang, which divide positions instead of frequencies."""
    return replace(rounding, computed=f"{rounding.computed}, positions divided by the factor")


def linear(config: ConfigRope, scaling: Linear) -> Answer:
    """Apply the rule of linear scaling in vLLM and SGLang, where the factor must be a float in the config."""
    if type(config.section.get("factor")) is int:
        return Answer(None, refusal=f"{_INTEGER}. Write {config.section['factor']}.0")
    return one_position(config, scaling)


def one_position(config: ConfigRope, scaling: Scaling) -> Answer:
    """Apply the rule of schemes whose classes in vLLM and SGLang do not divide the pairs among axes."""
    if config.several_axes:
        return Answer(None, refusal="its class for this scheme takes one position for each token, not several")
    return Answer(config.rope)


def proportional(config: ConfigRope, scaling: Proportional) -> Answer:
    """Apply the rule of proportional scaling in vLLM and SGLang, which ignore the factor."""
    return Answer(config.with_scaling(replace(scaling, factor=1.0)))


def _telechat3(config: ConfigRope, scaling: TeleChat3) -> Answer:
    """Replace an attention factor that the config states, as vLLM does, by that of the formula."""
    return Answer(config.with_scaling(replace(scaling, attention_factor=None)))


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    trained = config.section.get("max_trained_positions")
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH)
    rows = f"The table has {config.longest:,} rows, and larger positions read memory beyond it."
    if trained is None:
        note = "It never scales, because max_trained_positions is not given and defaults to max_position_embeddings."
        return Answer(config.with_scaling(None), notes=(note, rows))
    number = to_finite(trained)
    if number is None or number <= 0.0:
        return Answer(None, refusal="max_trained_positions must be a number above 0")
    alpha = scaling.factor * config.longest / number - (scaling.factor - 1)
    if alpha < 1.0:
        larger = "max_trained_positions is greater than max_position_embeddings"
        return Answer(None, refusal=f"{larger}, which is not described here", why="unknown")
    note = "The base is scaled once, by max_position_embeddings / max_trained_positions, for all lengths."
    return Answer(config.with_scaling(NTK(alpha=alpha)), notes=(note, rows))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    if config.model_type in DEEPSEEK or config.model_type == "axk1":
        return _deepseek(config, scaling)
    if not config.several_axes or config.model_type.startswith(("qwen3_vl", "qwen3_5", "qwen4")):  # they pass 1, not 4
        return Answer(config.rope)
    trained = scaling.original_max_position_embeddings
    note = (
        f"If tokens have several positions, the ends of the ramp are computed from 4 · {trained:,} tokens, because the "
        "length is multiplied before YaRN reads it."
    )
    return Answer(config.with_scaling(replace(scaling, original_max_position_embeddings=4 * trained)), notes=(note,))


def _deepseek(config: ConfigRope, scaling: YaRN) -> Answer:
    """Apply the rule of YaRN in vLLM's class for DeepSeek."""
    drops = config.section.get("attention_factor") == 1.0 and bool(config.section.get("mscale_all_dim"))
    notes = ("An attention_factor of 1 drops mscale_all_dim from the softmax scale.",) * drops
    return Answer(config.with_scaling(with_mscales(scaling)), notes=notes, reads=MSCALE_KEYS)


_longrope = longrope(
    "the setting",
    "The list is chosen once, when the engine starts: the long one, even for short sequences, if max_model_len exceeds "
    "{length}. If original_max_position_embeddings is a top-level key of the config, it is the default.",
    mscales=True,
    only_half=True,
)


_BASES: dict[str, float | None] = {
    "ernie45_moe": 500_000.0,
    "ernie45_vl_moe": 500_000.0,
    "exaone4": 1_000_000.0,
    "exaone_moe": 1_000_000.0,
    "falcon_h1": 1e11,
    "qwen2": 1_000_000.0,
    "qwen3": 1_000_000.0,
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "olmo_hybrid")),
}
"""The bases that files pass to `set_default_rope_theta`, or None if they stop without one."""
_OWN_CLASSES = "bailing_hybrid cosmos3_edge_text deepseek_v4 hy_v4 laguna muse_glimmer_assistant muse_glimmer_text "
_OWN_CLASSES += "step3p5"
"""The model_types with a class in `transformers_utils/configs`, or for which the choice is not that of transformers."""

VLLM = Engine(
    name="vLLM",
    version="0.33.0",
    rounding=_ROUNDING,
    rules={
        "default": Rule(f"{_FOLDER}/base.py"),
        "linear": Rule(f"{_FOLDER}/linear_scaling_rope.py", linear, rounding=divided(_ROUNDING)),
        "ntk": Rule(f"{_FOLDER}/dynamic_ntk_alpha_rope.py"),
        "dynamic": Rule(
            f"{_FOLDER}/dynamic_ntk_scaling_rope.py", _dynamic, frozenset({"factor", "max_trained_positions"})
        ),
        "yarn": Rule(f"{_FOLDER}/yarn_scaling_rope.py", _yarn),
        DEEPSEEK_YARN: Rule(f"{_FOLDER}/deepseek_scaling_rope.py", _deepseek, evidence="read"),
        "telechat3-yarn": Rule("transformers_utils/config.py", _telechat3, _TELECHAT3_KEYS, evidence="read"),
        "longrope": Rule(
            f"{_FOLDER}/phi3_long_rope_scaled_rope.py",
            _longrope,
            frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"}),
        ),
        "llama3": Rule(f"{_FOLDER}/llama3_rope.py", one_position),
        "proportional": Rule(f"{_FOLDER}/gemma4_rope.py", proportional, frozenset()),
    },
    files="vllm",
    lender=replace(TRANSFORMERS, rounding=replace(_ROUNDING, where="CPU", source="the file of the model")),
    own_classes=frozenset(_OWN_CLASSES.split()),
    two_types=("its rope_type and type differ (ValueError)", "refused"),
    reads_by_transformers="transformers_utils/config.py",
    without_length=AS_TRANSFORMERS,
    unknown="get_rope: Unknown RoPE scaling type (ValueError)",
    own_format=("params.json of Mistral", "vllm/transformers_utils/configs/mistral.py"),
    query_scale="it reads llama_4_scaling from Mistral's params.json, not llama_4_scaling_beta from config.json",
    other_class="dual_chunk_attention_config",
    # --rope-scaling and --rope-theta no longer exist. The JSON replaces the parameters after the config was loaded.
    override=Override(
        shell("vllm serve", "--hf-overrides", "--max-model-len"),
        "engine/arg_utils.py, config/model.py",
        merges="below the top",
        deepest=4,
        python=call("vllm.LLM", "hf_overrides", "max_model_len"),
        bases={f"model_executor/models/{name}.py": base for name, base in _BASES.items()},
    ),
)
