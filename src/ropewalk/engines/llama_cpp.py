"""The rules of llama.cpp: which keys its converter writes into a GGUF file, and which of them its code then reads.

For YaRN, llama.cpp reads only the factor and the trained length for most architectures. It ignores other keys that the
converter has written.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import (
    AS_TRANSFORMERS,
    DEEPSEEK_YARN,
    HUNYUAN,
    MIXED_WINDOWS,
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope,
    with_attention_factor,
    yarn_magnitude,
)
from ropewalk.engines._override import Flags
from ropewalk.rope.rope import Rope
from ropewalk.schemes import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, YaRN

_PHI = frozenset({"phi3", "phi3small", "phi4mm", "phimoe"})
_MINICPM = frozenset({"minicpm", "minicpm3"})
_DEEPSEEK2 = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"})
_WRITES_MSCALE = _DEEPSEEK2 | {"deepseek_v32", "ministral3", "mistral4"}
_READS_BETAS = frozenset({"ministral3"})
_KEEP_WINDOWS = frozenset({"afmoe", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "mellum"})
_KEEP_WINDOWS |= {"mimo_v2", "mimo_v2_flash", "modernbert", "olmo3", "step3p5"}
"""The model_types of which `src/models` rotates layers with a window by the numbers of the file.

It calls `llama_model::get_rope_freq_scale` for each layer, or passes 1 in `olmo2.cpp` and `mellum.cpp`.
"""


def _ntk(config: ConfigRope, scaling: NTK) -> Answer:
    if not config.model_type.startswith(HUNYUAN):
        return Answer(config.with_scaling(None), notes=("The converter writes no scaling for dynamic NTK.",))
    moe = config.model_type == "hunyuan_v1_moe"
    known = config.rope.base == 10_000.0 and config.longest in (32_768, 262_144)
    if moe:
        known = known and scaling.alpha == 1000.0 and config.rope.head_dim == 128
    if not known and config.model_type != "hunyuan_vl":
        return Answer(None, refusal="the converter only accepts Hunyuan's published numbers (AssertionError)")
    return Answer(config.rope)


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    if config.model_type == "hunyuan_v1_dense":
        return Answer(None, refusal="the converter only accepts Hunyuan's published numbers (AssertionError)")
    return Answer(config.with_scaling(None), notes=("The converter silently writes no scaling for dynamic NTK.",))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    scaling, reads = replace(scaling, truncate=True), {"factor"}
    if config.model_type in _READS_BETAS:
        reads |= {"beta_fast", "beta_slow"}
    else:
        scaling = replace(scaling, beta_fast=32.0, beta_slow=1.0)
    reads |= {"mscale_all_dim"} if config.model_type in _WRITES_MSCALE else set()
    rope = config.with_scaling(with_attention_factor(scaling, _attention(config, scaling)))
    return Answer(rope, reads=frozenset(reads))


def _unknown(config: ConfigRope, scaling: YaRN) -> Answer:
    note = "The converter does not know this rope_type, and writes no scaling."
    return Answer(config.with_scaling(None), notes=(note,))


def _attention(config: ConfigRope, scaling: YaRN) -> float:
    """Return the attention factor that `llama-context.cpp` computes, dimensionless.

    It is YaRN's magnitude, divided by the magnitude for mscale_all_dim if the converter writes that key. For models
    that llama.cpp runs as DeepSeek V2, both use mscale_all_dim, so the factor is 1.
    """
    bottom = scaling.mscale_all_dim or 0.0
    if not bottom or config.model_type not in _WRITES_MSCALE:
        return yarn_magnitude(scaling.factor)
    top = bottom if config.model_type in _DEEPSEEK2 else 1.0
    return yarn_magnitude(scaling.factor, top) / yarn_magnitude(scaling.factor, bottom)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    if config.model_type in _MINICPM:
        if config.longest is None:
            return Answer(None, refusal=NO_LENGTH)
        scaling = replace(
            scaling,
            original_max_position_embeddings=config.longest,
            attention_factor=1.0,
            short_mscale=None,
            long_mscale=None,
        )
        note = "For MiniCPM the converter writes neither the trained length nor the attention factor."
        return Answer(config.with_scaling(scaling), "the setting", (note,))
    if config.model_type not in _PHI:
        note = "The converter writes the two lists for Phi and MiniCPM only, so nothing is scaled."
        return Answer(config.with_scaling(None), notes=(note,))
    return _LONGROPE(config, scaling)


_LONGROPE = longrope(
    "the setting", "The context length of one sequence chooses the list: the long one if it exceeds {length}."
)


def _proportional(config: ConfigRope, scaling: Proportional) -> Answer:
    if not config.model_type.startswith("gemma4"):
        return Answer(
            config.with_scaling(None), notes=("The converter writes it for Gemma 4 only, so nothing is scaled.",)
        )
    if scaling.factor != 1.0:
        return Answer(config.with_scaling(replace(scaling, factor=1.0)))
    return Answer(config.rope)


def _flags(config: ConfigRope, read: Rope, rope: Rope) -> tuple[str, Rope] | str:
    """Return the arguments that state a rope, and the rope that llama.cpp then computes; or why there are none.

    `common/arg.cpp` defines them, and `llama-model.cpp` applies them. For YaRN, `llama-context.cpp` computes the
    attention factor itself and overwrites that of --yarn-attn-factor. With the mscale_all_dim of the file,
    `deepseek2.cpp` and `deepseek32.cpp` scale the scores, for linear scaling as well. For tokens with several
    positions, `ggml_mrope_cache_init` scales each pair in the same way.
    """
    scheme = rope.scaling
    if isinstance(read.scaling, Llama3 | LongRoPE):
        return f"the factors of {read.scaling.rope_type} are a tensor of its file, which no argument replaces"
    in_file, stated = (getattr(scaling, "mscale_all_dim", None) or 0.0 for scaling in (read.scaling, scheme))
    if in_file != stated and config.model_type in _WRITES_MSCALE:
        return "no argument of it replaces mscale_all_dim, which is in its file"
    flags = f"--rope-freq-base {_number(rope.base)}"
    if scheme is None:
        flags = f"--rope-scaling none {flags}"
    elif isinstance(scheme, Linear):
        flags = f"--rope-scaling linear --rope-scale {_number(scheme.factor)} {flags}"
    elif isinstance(scheme, YaRN):
        flags = (
            f"--rope-scaling yarn --rope-scale {_number(scheme.factor)} "
            f"--yarn-orig-ctx {scheme.original_max_position_embeddings} "
            f"--yarn-beta-fast {_number(scheme.beta_fast)} --yarn-beta-slow {_number(scheme.beta_slow)} {flags}"
        )
        scheme = replace(scheme, truncate=True)
        scheme = with_attention_factor(scheme, _attention(config, scheme))
    else:
        return f"no argument of it states {scheme.rope_type} scaling"
    return flags, replace(read, base=rope.base, scaling=scheme)


def _command(model: str, flags: str, tokens: int) -> str:
    file = model if model.endswith(".gguf") else "MODEL.gguf"
    words = ["llama-server -m", shlex.quote(file), flags, f"-c {tokens}"]
    return " ".join(filter(None, words))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


_CONVERTER = "conversion/base.py, src/llama-context.cpp"

LLAMA_CPP = Engine(
    name="llama.cpp",
    version="0c1e57098",
    rounding=Rounding(
        computed="float32 powers of one ratio",
        table="float32",
        rotation="float32",
        notes="On a CPU, the angle of a pair is a product of that of the previous pair. YaRN mixes angles.",
        source="ggml/src/ggml-cuda/rope.cu, ggml/src/ggml-cpu/ops.cpp",
    ),
    rules={
        "default": Rule("ggml/src/ggml-cpu/ops.cpp"),
        "linear": Rule(_CONVERTER),
        "ntk": Rule("conversion/hunyuan.py", _ntk),
        "dynamic": Rule("conversion/base.py", _dynamic),
        "yarn": Rule(_CONVERTER, _yarn),
        DEEPSEEK_YARN: Rule("conversion/base.py", _unknown, evidence="read"),
        "longrope": Rule(
            "conversion/phi.py, src/llama-model.cpp", _longrope, frozenset({"short_factor", "long_factor"})
        ),
        "llama3": Rule("conversion/llama.py"),
        # For Gemma 4 the code was only read. For other models it was run, and does not scale them.
        "proportional": Rule("conversion/gemma.py", _proportional, frozenset(), evidence="read"),
    },
    files="llama_cpp",
    no_rope_every={"afmoe": 4, "smollm3": 4},  # n_no_rope_layer_step, which no key of a file states
    own_format=("GGUF file", "src/llama-model.cpp"),
    own_classes=frozenset({"laguna", "mellum", "phi3"}),  # for which the recorded choice is not that of transformers
    own_length=lambda model_type: True,
    reads_by_transformers="conversion/base.py",
    without_length=AS_TRANSFORMERS,
    unknown="the converter knows no such rope type",
    windows=MIXED_WINDOWS | {"modernbert"},
    override=Flags(_flags, _command, _KEEP_WINDOWS),
)
