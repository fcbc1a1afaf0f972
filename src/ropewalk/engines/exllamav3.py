"""exllamav3: YaRN's factor from the two lengths of the config, and its attention factor without mscale."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import (
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
from ropewalk.schemes import LongRoPE, YaRN

_FILE = "util/rope.py"
_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2")  # architecture/deepseek_v3.py sets yarn_mscale_ratio, and no other does


def _yarn(asked: Asked, scaling: YaRN) -> Answer:
    notes: tuple[str, ...] = ()
    if asked.longest is None:
        return Answer(None, refused=NO_LENGTH)
    trained = scaling.original_max_position_embeddings
    factor = asked.longest / trained
    if factor < 1.0:
        return Answer(None, refused="max_position_embeddings is below the trained length: not described")
    if factor != scaling.factor:
        said = f"The factor is max_position_embeddings / original_max_position_embeddings, {factor:g}"
        notes = (f"{said}: the config's {scaling.factor:g} does not count.",)
    stretched = replace(scaling, factor=factor)
    attention, more = _attention(asked, scaling, factor)
    return Answer(asked.scaled(with_attention(stretched, attention)), notes=(*notes, *more))


def _attention(asked: Asked, scaling: YaRN, factor: float) -> tuple[float, tuple[str, ...]]:
    if scaling.attention_factor is not None:
        return scaling.attention_factor, ()
    if scaling.mscale and scaling.mscale_all_dim:
        if asked.model_type in _DEEPSEEK_V3:
            return magnitude(factor, scaling.mscale) / magnitude(factor, scaling.mscale_all_dim), ()
        ignored = "It takes mscale and mscale_all_dim for DeepSeek-V3 alone, since elsewhere they are inert."
    else:
        ignored = ""
    if asked.stated.get("llama_4_scaling_beta"):
        return 1.0, ("llama_4_scaling_beta takes the place of YaRN's attention factor, which is 1.",)
    return magnitude(factor), (ignored,) if ignored else ()


def _longrope(asked: Asked, scaling: LongRoPE) -> Answer:
    length = scaling.original_max_position_embeddings
    made = longrope_by_lengths(asked, scaling, mscales=False)
    if made is None:
        return Answer(None, refused=NO_LENGTH)
    note = f"The list is chosen when the model is loaded: the long one if the length asked for is above {length:,}."
    return Answer(asked.scaled(made), "the setting", (note,))


EXLLAMAV3 = Engine(
    name="exllamav3",
    version="1.6.5",
    table="Angles, cos and sin are float32, made inside of its kernel.",
    rules={
        "default": Rule(_FILE, frozenset(), as_read),
        "linear": Rule(_FILE, frozenset({"factor"}), as_read),
        "yarn": Rule(
            _FILE,
            frozenset({"attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "truncate"}),
            _yarn,
        ),
        "longrope": Rule(_FILE, frozenset({"short_factor", "long_factor"}), _longrope),
        "llama3": Rule(_FILE, frozenset({"factor", "low_freq_factor", "high_freq_factor"}), as_read),
        "proportional": Rule(_FILE, frozenset({"factor"}), as_read),
    },
    unknown="Unknown rope_type (ValueError)",
)
