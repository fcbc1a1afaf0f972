"""The rules of mlx-lm, which multiplies q and k by the attention factor and always uses LongRoPE's long list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import (
    DEEPSEEK_YARN,
    MSCALE_KEYS,
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    dynamic_by_factor,
    longrope_magnitude,
    with_mscales,
)
from ropewalk.schemes import NTK, DynamicNTK, LongRoPE, PerPair, YaRN

if TYPE_CHECKING:
    from ropewalk.schemes import Reversed

_FILE = "models/rope_utils.py"
_HUNYUAN = ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")


def _default(config: ConfigRope, scaling: None) -> Answer:
    if config.model_type == "minicpm3":
        said = "what its class for MiniCPM3 computes without LongRoPE was not recorded"
        return Answer(None, refusal=said, why="unknown")
    return Answer(config.rope)


def _ntk(config: ConfigRope, scaling: NTK) -> Answer:
    return Answer(config.rope) if config.model_type in _HUNYUAN else dynamic_by_factor(config)


def _dynamic(config: ConfigRope, scaling: DynamicNTK) -> Answer:
    note = (
        "The length is that of the cache plus the call. Cached keys keep the rotation for the length at which they "
        "were stored."
    )
    return Answer(config.rope, "the call", (note,))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    alone = (scaling.mscale is None) is not (scaling.mscale_all_dim is None)
    note = ("It reads mscale or mscale_all_dim alone as well, and uses 1 or 0 for the missing one.",) if alone else ()
    return Answer(config.with_scaling(with_mscales(scaling)), notes=note)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    factor = longrope_magnitude(config.longest, scaling.original_max_position_embeddings)
    reads = frozenset({"short_factor", "long_factor"})  # short_factor, because a note says what becomes of it
    if config.model_type == "phimoe" and scaling.long_mscale is not None:
        factor, reads = scaling.long_mscale, reads | {"long_mscale"}
    if factor is None:
        return Answer(None, refusal=NO_LENGTH)
    rope = config.with_scaling(PerPair(factors=scaling.long_factor, attention_factor=factor))
    if config.rope.pairing != "half":
        return Answer(None, refusal="its class supports only the pairing half")
    note = "It uses the long list at every length and ignores short_factor."
    return Answer(rope, notes=(note,), reads=reads)


def _reversed(config: ConfigRope, scaling: Reversed) -> Answer:
    return Answer(config.with_scaling(replace(scaling, scaling=None)))


MLX_LM = Engine(
    name="mlx-lm",
    version="0.32.2",
    rounding=Rounding(
        computed="float32 exp2",
        table="float32",
        rotation="float32",
        factor="q and k in the model's dtype",
        source=f"{_FILE}, mlx/backend/metal/kernels/rope.metal",
    ),
    rules={
        "default": Rule(_FILE, _default),
        "linear": Rule(_FILE),
        "ntk": Rule("models/hunyuan_v1_dense.py, models/rope_utils.py", _ntk, frozenset({"alpha", "factor"})),
        "dynamic": Rule(_FILE, _dynamic),
        "yarn": Rule(_FILE, _yarn, MSCALE_KEYS),
        DEEPSEEK_YARN: Rule(_FILE, _yarn, MSCALE_KEYS, evidence="read"),
        "telechat3-yarn": Rule(_FILE, _yarn, MSCALE_KEYS, evidence="read"),
        "reversed": Rule("models/nanochat.py, models/talkie.py", _reversed, frozenset(), evidence="read"),
        "longrope": Rule(_FILE, _longrope),
        "llama3": Rule(_FILE),
        "proportional": Rule(_FILE),
    },
    files="mlx_lm",
    other_class="rope_traditional",
    without_length={"yarn": 4096, "llama3": 8192},
    precedence=True,
    two_types=("it reads type first, and its scheme was not recorded for this config", "unknown"),
    unknown="initialize_rope: Unsupported RoPE type (ValueError)",
    serve=lambda *_: "mlx_lm.server needs no argument, because its cache grows with the text",  # mlx-examples #1170
)
