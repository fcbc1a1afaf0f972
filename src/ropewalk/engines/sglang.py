"""SGLang: tables as vLLM's, LongRoPE switched by the whole batch."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import (
    DEEPSEEK,
    NO_LENGTH,
    Answer,
    Asked,
    Engine,
    Rule,
    as_read,
    finite,
    ignoring,
    longrope_by_lengths,
    magnitude,
    partly_kept,
    with_attention,
)
from ropewalk.engines.vllm import linear, proportional
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, YaRN

_FOLDER = "srt/layers/rotary_embedding"


def _dynamic(asked: Asked, scaling: DynamicNTK) -> Answer:
    longest = scaling.factor * scaling.max_position_embeddings
    note = f"The base is stretched once, for {longest:,.0f} tokens, at every length: short prompts are scaled too."
    return Answer(asked.scaled(NTK(alpha=scaling.factor * scaling.factor - (scaling.factor - 1))), notes=(note,))


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    times, share = (finite(asked.stated.get(key), 1.0) for key in ("attn_factor", "extrapolation_factor"))
    if times is None or share is None or times <= 0.0 or not 0.0 <= share <= 1.0:
        return Answer(None, refused="attn_factor of at most 0, or extrapolation_factor outside 0 to 1: not described")
    top, bottom = scaling.mscale, scaling.mscale_all_dim
    factor = magnitude(scaling.factor)
    notes: tuple[str, ...] = ()
    if asked.model_type in DEEPSEEK:
        scaling, notes = replace(scaling, truncate=True), ignoring(asked, "truncate")
        top, bottom = 1.0 if top is None else top, bottom or 0.0
    elif asked.several_axes and (top is not None or bottom is not None):
        return Answer(None, refused="its class for several axes takes no mscale (TypeError)")
    if top is not None and bottom is not None:
        factor = magnitude(scaling.factor, top) / magnitude(scaling.factor, bottom)
        notes += ("mscale and mscale_all_dim count where both are given, 0 too.",) if not (top and bottom) else ()
    if share != 1.0:
        rope = partly_kept(asked, scaling, share, factor * times)
        return Answer(rope, notes=(*notes, f"extrapolation_factor {share:g} slows the fast pairs too."))
    return Answer(asked.scaled(with_attention(scaling, factor * times)), notes=notes)


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if asked.rope.pairing != "half":
        return Answer(None, refused="its class takes the pairing half only (ValueError)")
    made = longrope_by_lengths(asked, scaling, mscales=True)
    if made is None:
        return Answer(None, refused=NO_LENGTH)
    notes = (
        f"The list is chosen in each call for the whole batch: one position above {length:,} switches every other "
        "sequence to the long one.",
        f"Position {length:,} itself, where nothing is longer, reads the first row of the long table, so that token is "
        "not rotated.",
    )
    # A call of length + 1 tokens still takes the short list, but for its last token.
    attention = None if made.short_mscale is not None else made.at_length(length).attention_factor
    later = replace(made, original_max_position_embeddings=length + 1, attention_factor=attention)
    return Answer(asked.scaled(later), "the call", notes)


SGLANG = Engine(
    name="SGLang",
    version="0.5.23",
    table="Angles are float32 products; cos and sin are float32 on GPUs, and of the model's dtype elsewhere.",
    rules={
        "default": Rule(f"{_FOLDER}/base.py", frozenset(), as_read),
        "linear": Rule(f"{_FOLDER}/base.py", frozenset({"factor"}), linear),
        "ntk": Rule(f"{_FOLDER}/rope_variant.py", frozenset({"alpha"}), as_read),
        "dynamic": Rule(f"{_FOLDER}/rope_variant.py", frozenset({"factor"}), _dynamic),
        "yarn": Rule(
            f"{_FOLDER}/yarn.py",
            frozenset(
                {
                    "attn_factor",
                    "beta_fast",
                    "beta_slow",
                    "extrapolation_factor",
                    "factor",
                    "mscale",
                    "mscale_all_dim",
                    "truncate",
                }
            ),
            _yarn,
        ),
        "longrope": Rule(
            f"{_FOLDER}/rope_variant.py",
            frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"}),
            _longrope,
        ),
        "llama3": Rule(
            f"{_FOLDER}/rope_variant.py", frozenset({"factor", "low_freq_factor", "high_freq_factor"}), as_read
        ),
        "proportional": Rule(f"{_FOLDER}/rope_variant.py", frozenset(), proportional),
    },
    unknown="get_rope: Unknown RoPE scaling type (ValueError)",
)
