"""The rules of MaxText, a trainer in JAX. Its models are YAML files, whose names decide which of them are scaled."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._engine import Engine, Rounding, Rule

_FILE = "layers/embeddings.py"
_ROUNDING = Rounding(
    computed="float32 powers of XLA, positions divided by their inverses",
    notes="XLA computes cos and sin, and may leave out the rounding of operations inside a kernel.",
    source=_FILE,
    evidence="run",
)
_FLOAT32 = replace(_ROUNDING, table="float32", rotation="float32")
_PRODUCTS = replace(_FLOAT32, computed="float32 powers of XLA")
_BY_NAME = Rule(f"{_FILE}, layers/attentions.py")

MAXTEXT = Engine(
    name="MaxText",
    version="0.2.5",
    rounding=_ROUNDING,
    rules={
        "default": _BY_NAME,
        "linear": _BY_NAME,
        "proportional": _BY_NAME,
        "llama3": replace(_BY_NAME, rounding=_FLOAT32),
        "yarn": replace(_BY_NAME, rounding=replace(_PRODUCTS, factor="q and k in float32")),
    },
    files="maxtext",
    built_in=True,
    unknown="it has no such scaling",
    models={
        "llama4_text": _FLOAT32,
        **dict.fromkeys(
            (
                "deepseek_v4",
                "qwen3_5_moe_text",
                "qwen3_omni_moe_text",
                "qwen3_vl_moe_text",
                "qwen3_vl_text",
            ),
            _PRODUCTS,
        ),
    },
)
