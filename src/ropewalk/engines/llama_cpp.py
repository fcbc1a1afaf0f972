"""llama.cpp: what its converter writes into a GGUF file, and what its context makes of that.

Most architectures read YaRN's factor and length alone: the converter writes more, and nothing reads it.
"""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import (
    HUNYUAN,
    NO_LENGTH,
    Answer,
    Asked,
    Engine,
    Rule,
    as_read,
    longrope_by_lengths,
    magnitude,
    with_attention,
)
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, Proportional, YaRN

_PHI = frozenset({"phi3", "phi3small", "phi4mm", "phimoe"})
_MINICPM = frozenset({"minicpm", "minicpm3"})
_DEEPSEEK2 = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"})
_WRITES_MSCALE = _DEEPSEEK2 | {"deepseek_v32", "ministral3", "mistral4"}
_READS_BETAS = frozenset({"ministral3"})


def _ntk(asked: Asked, scaling: NTK) -> Answer:
    if not asked.model_type.startswith(HUNYUAN):
        return Answer(asked.scaled(None), notes=("The converter writes no scaling for a dynamic one.",))
    moe = asked.model_type == "hunyuan_v1_moe"
    known = asked.rope.base == 10_000.0 and asked.longest in (32_768, 262_144)
    if moe:
        known = known and scaling.alpha == 1000.0 and asked.rope.head_dim == 128
    if not known and asked.model_type != "hunyuan_vl":
        return Answer(None, refused="the converter knows Hunyuan's published numbers only (AssertionError)")
    return Answer(asked.rope)


def _dynamic(asked: Asked, scaling: DynamicNTK) -> Answer:
    return Answer(asked.scaled(None), notes=("The converter writes no scaling for a dynamic one, and says nothing.",))


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    scaling, unread = replace(scaling, truncate=True), ["attention_factor", "attn_factor", "extrapolation_factor"]
    if asked.model_type not in _READS_BETAS:
        scaling = replace(scaling, beta_fast=32.0, beta_slow=1.0)
        unread += ["beta_fast", "beta_slow"]
    unread += ["mscale"] if asked.model_type in _WRITES_MSCALE else ["mscale", "mscale_all_dim"]
    stated = sorted(key for key in unread if asked.stated.get(key) is not None)
    notes = (f"It ignores {', '.join(stated)}: not written, not read or overwritten for this model.",) if stated else ()
    return Answer(asked.scaled(with_attention(scaling, _attention(asked, scaling))), notes=notes)


def _attention(asked: Asked, scaling: YaRN) -> float:
    """`llama-context.cpp`: m(1), by m(mscale_all_dim) for the models whose converters write that."""
    bottom = scaling.mscale_all_dim or 0.0
    if not bottom or asked.model_type not in _WRITES_MSCALE:
        return magnitude(scaling.factor)
    top = bottom if asked.model_type in _DEEPSEEK2 else 1.0
    return magnitude(scaling.factor, top) / magnitude(scaling.factor, bottom)


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if asked.model_type in _MINICPM:
        if asked.longest is None:
            return Answer(None, refused=NO_LENGTH)
            scaling = replace(
                scaling,
                original_max_position_embeddings=asked.longest,
                attention_factor=1.0,
                short_mscale=None,
                long_mscale=None,
            )
        note = "For MiniCPM the converter writes neither the trained length nor the attention factor."
        return Answer(asked.scaled(scaling), "the setting", (note,))
    if asked.model_type not in _PHI:
        note = "The converter writes the two lists for Phi and MiniCPM only, so that nothing is scaled."
        return Answer(asked.scaled(None), notes=(note,))
    made = longrope_by_lengths(asked, scaling, mscales=False)
    if made is None:
        return Answer(None, refused=NO_LENGTH)
    note = f"The list is chosen by the context for one sequence: the long one if that is above {length:,}."
    return Answer(asked.scaled(made), "the setting", (note,))


def _proportional(asked: Asked, scaling: Proportional) -> Answer:
    if not asked.model_type.startswith("gemma4"):
        return Answer(asked.scaled(None), notes=("The converter knows it for Gemma 4 only, and scales nothing.",))
    if scaling.factor != 1.0:
        return Answer(asked.scaled(replace(scaling, factor=1.0)))
    return Answer(asked.rope)


# What becomes of these depends on the model, so the rule says it in a sentence of its own.
_SAID_BY_THE_RULE = frozenset(
    {
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "extrapolation_factor",
        "mscale",
        "mscale_all_dim",
    }
)
_CONVERTER = "conversion/base.py, src/llama-context.cpp"
_BANDS = frozenset({"factor", "low_freq_factor", "high_freq_factor"})

LLAMA_CPP = Engine(
    name="llama.cpp",
    version="0c1e57098",
    table="No table: on the CPU each angle is a float32 product of that of the pair before. The converter permutes "
    "q and k of some models to the other pairing.",
    rules={
        "default": Rule("ggml/src/ggml-cpu/ops.cpp", frozenset(), as_read),
        "linear": Rule(_CONVERTER, frozenset({"factor"}), as_read),
        "ntk": Rule("conversion/hunyuan.py", frozenset({"alpha"}), _ntk),
        "dynamic": Rule("conversion/base.py", frozenset({"factor"}), _dynamic),
        "yarn": Rule(
            _CONVERTER,
            _SAID_BY_THE_RULE | {"factor"},
            _yarn,
        ),
        "longrope": Rule(
            "conversion/phi.py, src/llama-model.cpp", frozenset({"short_factor", "long_factor"}), _longrope
        ),
        "llama3": Rule("conversion/llama.py", _BANDS, as_read),
        # Gemma 4 was read; that other models are not scaled was run.
        "proportional": Rule("conversion/gemma.py", frozenset(), _proportional, "read"),
    },
    unknown="the converter knows no such rope type",
)
