"""vLLM: everything is fixed when the engine starts, by max_model_len."""

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
    with_attention,
)
from ropewalk.schemes import NTK, DynamicNTK, Linear, LongRoPE, Proportional, YaRN

_FOLDER = "model_executor/layers/rotary_embedding"
_INTEGER = "a factor that is an integer stops it: TypeError: 'int' object is not iterable"


def linear(asked: Asked, scaling: Linear) -> Answer:
    """Positions divided by the factor, which must be a float in the file; SGLang has the same class."""
    if type(asked.stated.get("factor")) is int:
        return Answer(None, refused=f"{_INTEGER}. Write {asked.stated['factor']}.0")
    return Answer(asked.rope)


def proportional(asked: Asked, scaling: Proportional) -> Answer:
    """The frequencies without the factor; SGLang has the same class."""
    if scaling.factor != 1.0:
        return Answer(asked.scaled(replace(scaling, factor=1.0)))
    return Answer(asked.rope)


def _dynamic(asked: Asked, scaling: DynamicNTK) -> Answer:
    trained = asked.stated.get("max_trained_positions")
    if asked.longest is None:
        return Answer(None, refused=NO_LENGTH)
    rows = f"The table has {asked.longest:,} rows; positions beyond read whatever memory follows it."
    if trained is None:
        note = "It never scales: max_trained_positions, which is not given, is taken to be max_position_embeddings."
        return Answer(asked.scaled(None), notes=(note, rows))
    number = finite(trained)
    if number is None or number <= 0.0:
        return Answer(None, refused="max_trained_positions must be a number above 0")
    alpha = scaling.factor * asked.longest / number - (scaling.factor - 1)
    if alpha < 1.0:
        return Answer(None, refused="max_trained_positions is greater than max_position_embeddings: not described")
    note = "The base is stretched once, for max_position_embeddings over max_trained_positions, at every length."
    return Answer(asked.scaled(NTK(alpha=alpha)), notes=(note, rows))


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    if asked.model_type in DEEPSEEK or asked.model_type == "axk1":
        return _deepseek(asked, scaling)
    if not asked.several_axes:
        return Answer(asked.rope)
    trained = scaling.original_max_position_embeddings
    note = (
        f"With several positions for a token the ends of the ramp are computed from 4 · {trained:,} tokens, since the "
        "length is multiplied before YaRN reads it."
    )
    return Answer(asked.scaled(replace(scaling, original_max_position_embeddings=4 * trained)), notes=(note,))


def _deepseek(asked: Asked, scaling: YaRN) -> Answer:
    """DeepSeek's own class: the ratio of both mscales, 1 and 0 where they are missing; always rounded."""
    scaling = replace(scaling, truncate=True)
    notes = ignoring(asked, "attention_factor", "truncate")
    if asked.stated.get("attention_factor") == 1.0 and asked.stated.get("mscale_all_dim"):
        notes += ("An attention_factor of 1 also drops mscale_all_dim from the softmax scale.",)
    top = 1.0 if scaling.mscale is None else scaling.mscale
    factor = magnitude(scaling.factor, top) / magnitude(scaling.factor, scaling.mscale_all_dim or 0.0)
    return Answer(asked.scaled(with_attention(scaling, factor)), notes=notes)


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    if asked.rope.pairing != "half":
        return Answer(None, refused="its class takes the pairing half only (ValueError)")
    made = longrope_by_lengths(asked, scaling, mscales=True)
    if made is None:
        return Answer(None, refused=NO_LENGTH)
    note = (
        f"The list is chosen once, when the engine starts: the long one, for short sequences too, if max_model_len is "
        f"above {length:,}. Its default is original_max_position_embeddings where that stands at the top of the config."
    )
    return Answer(asked.scaled(made), "the setting", (note,))


VLLM = Engine(
    name="vLLM",
    version="0.32.0",
    table="Angles are float32 products; the table of cos and sin is rounded to the dtype of the model.",
    rules={
        "default": Rule(f"{_FOLDER}/base.py", frozenset(), as_read),
        "linear": Rule(f"{_FOLDER}/linear_scaling_rope.py", frozenset({"factor"}), linear),
        "ntk": Rule(f"{_FOLDER}/dynamic_ntk_alpha_rope.py", frozenset({"alpha"}), as_read),
        "dynamic": Rule(
            f"{_FOLDER}/dynamic_ntk_scaling_rope.py", frozenset({"factor", "max_trained_positions"}), _dynamic
        ),
        "yarn": Rule(
            f"{_FOLDER}/yarn_scaling_rope.py",
            frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
            _yarn,
        ),
        "longrope": Rule(
            f"{_FOLDER}/phi3_long_rope_scaled_rope.py",
            frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"}),
            _longrope,
        ),
        "llama3": Rule(
            f"{_FOLDER}/llama3_rope.py", frozenset({"factor", "low_freq_factor", "high_freq_factor"}), as_read
        ),
        "proportional": Rule(f"{_FOLDER}/gemma4_rope.py", frozenset(), proportional),
    },
    unknown="get_rope: Unknown RoPE scaling type (ValueError)",
    query_scale="it reads llama_4_scaling of Mistral's params.json, not llama_4_scaling_beta of config.json",
)
