"""The rules of torchtitan, whose flavors have their ropes in code, and which scales scores in place of cos and sin."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import Engine, Rounding, Rule

_FILE = "models/common/rope.py"
_ROUNDING = Rounding(
    table="float32",
    rotation="float32",
    notes="Converters permute q and k of Llama 3 and Muse Glimmer to neighbouring channels, which rotate as complex64.",
    source=_FILE,
    evidence="run",
)

_COMPLEX = ("deepseek_v2", "deepseek_v3", "kimi_k2", "llama", "muse_glimmer_text")  # ComplexRoPE

TORCHTITAN = Engine(
    name="torchtitan",
    version="0.3.0",
    rounding=_ROUNDING,
    rules={"default": Rule(_FILE), "llama3": Rule(_FILE), "yarn": Rule(_FILE)},
    files="torchtitan",
    built_in=True,
    unknown="it has no such scaling",
    models={
        "gpt_oss": replace(_ROUNDING, factor="the scale of the softmax", source="models/gpt_oss/model.py"),
        **dict.fromkeys(_COMPLEX, replace(_ROUNDING, is_complex=True)),
    },
)
