"""The rules of exllamav3, which computes YaRN's factor from the maximum and the trained length of the config."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import (
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope,
    with_attention_factor,
    yarn_magnitude,
)
from ropewalk.schemes import YaRN

_FILE = "util/rope.py"
_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2")  # only architecture/deepseek_v3.py sets yarn_mscale_ratio


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    notes: tuple[str, ...] = ()
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH)
    trained = scaling.original_max_position_embeddings
    factor = config.longest / trained
    if factor < 1.0:
        said = "max_position_embeddings is below the trained length, which is not described here"
        return Answer(None, refusal=said, why="unknown")
    if factor != scaling.factor:
        computed = f"The factor is max_position_embeddings / original_max_position_embeddings = {factor:g}"
        notes = (f"{computed}. The config's factor {scaling.factor:g} is ignored.",)
    stretched = replace(scaling, factor=factor)
    attention, more = _attention(config, scaling, factor)
    return Answer(config.with_scaling(with_attention_factor(stretched, attention)), notes=(*notes, *more))


def _attention(config: ConfigRope, scaling: YaRN, factor: float) -> tuple[float, tuple[str, ...]]:
    if scaling.attention_factor is not None:
        return scaling.attention_factor, ()
    if scaling.mscale and scaling.mscale_all_dim:
        if config.model_type in _DEEPSEEK_V3:
            return yarn_magnitude(factor, scaling.mscale) / yarn_magnitude(factor, scaling.mscale_all_dim), ()
        ignored = "It reads mscale and mscale_all_dim for DeepSeek-V3 only."
    else:
        ignored = ""
    if config.section.get("llama_4_scaling_beta"):
        return 1.0, ("llama_4_scaling_beta replaces YaRN's attention factor, which is 1.",)
    return yarn_magnitude(factor), (ignored,) if ignored else ()


_longrope = longrope(
    "the setting", "The list is chosen when the model is loaded: the long one if the requested length exceeds {length}."
)


EXLLAMAV3 = Engine(
    name="exllamav3",
    version="1.6.5",
    rounding=Rounding(
        table="float32",
        rotation="float32",
        notes="cos and sin are computed inside its kernel.",
        source=f"{_FILE}, exllamav3_ext/rope.cu",
    ),
    rules={
        "default": Rule(_FILE),
        "linear": Rule(_FILE),
        "yarn": Rule(_FILE, _yarn),
        "longrope": Rule(_FILE, _longrope, frozenset({"short_factor", "long_factor"})),
        "llama3": Rule(_FILE),
        "proportional": Rule(_FILE),
    },
    files="exllamav3",
    without_length={"llama3": 8192},
    null_base=("olmo_hybrid",),  # read_rope_settings_default takes null for a missing key
    unknown="Unknown rope_type (ValueError)",
    # model_init.py: a cache in pages of 256 tokens. TabbyAPI's config_sample.yml: the length is at most that.
    serve=lambda _model, _keys, n: f"in TabbyAPI --max-seq-len {n} --cache-size {-(-(n or 0) // 256) * 256}",
)
