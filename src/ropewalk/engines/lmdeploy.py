"""The rules of lmdeploy's PyTorch engine, which reads a config with AutoConfig of transformers.

The rules of its other engine, TurboMind, were not looked up.
"""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._config import ConfigRope
from ropewalk.engines._engine import Answer, Engine, Rounding, Rule, dynamic_by_factor, longrope
from ropewalk.engines._override import shell
from ropewalk.schemes import NTK, DynamicNTK

_FILE = "pytorch/nn/rotary_embedding.py, pytorch/backends/default/rotary_embedding.py"
_ROUNDING = Rounding(
    where="CPU",
    notes="torch.compile compiles the product of positions and frequencies and its cos and sin.",
    source="pytorch/backends/default/rotary_embedding.py, pytorch/kernels/cuda/apply_rotary_pos_emb.py",
)


def _dynamic(config: ConfigRope, scaling: NTK | DynamicNTK) -> Answer:
    note = "The largest position of a batch decides the length, for all sequences in it."
    return replace(dynamic_by_factor(config), notes=(note,))


_longrope = longrope(
    "the call", "One position of {length} or more in a batch switches all sequences in it to the long list."
)


LMDEPLOY = Engine(
    name="lmdeploy",
    version="0.18.0",
    rounding=_ROUNDING,
    rules={
        "default": Rule(_FILE),
        "linear": Rule(_FILE, rounding=replace(_ROUNDING, computed="float32 powers, positions divided by the factor")),
        "ntk": Rule(_FILE, _dynamic, frozenset({"factor"})),
        "dynamic": Rule(_FILE, _dynamic),
        "yarn": Rule(_FILE),
        "longrope": Rule(_FILE, _longrope, frozenset({"short_factor", "long_factor"})),
        "llama3": Rule(_FILE),
    },
    files="lmdeploy",
    serve=shell("lmdeploy serve api_server --backend pytorch", "", "--session-len"),  # lmdeploy/cli/utils.py
    reads_by_transformers="lmdeploy/pytorch/config.py",
    unknown="build_rotary_params: it knows no such rope_type (KeyError)",
)
