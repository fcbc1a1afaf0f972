"""The rules of TensorRT-LLM's PyTorch backend: `RopeParams` reads a config, and `RopeEmbeddingUtils` computes a table.

All was read and not run, and the files are of several commits, because they could not be had at one:
`RopeParams.from_config` and `create_rope_const_params` at 51ea5c963, `RopeEmbeddingUtils` and `RotaryScalingType` at
0071496dc, `LlamaAttention` (with `fuse_pos_embd`) at 012cf9099, and requirements.txt (transformers==4.57.1) at
000867d9b. Not looked up: models other than Llama, several axes, the list of LongRoPE, and the kernels that rotate.
"""

from __future__ import annotations

from dataclasses import replace

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import MSCALE_KEYS, Answer, Engine, Rounding, Rule, with_mscales
from ropewalk.engines._override import shell
from ropewalk.schemes import NTK, DynamicNTK, Llama3, LongRoPE, YaRN

_PARAMS = "tensorrt_llm/_torch/attention_backend/interface.py"
_FILE = f"{_PARAMS}, tensorrt_llm/functional.py"
_FUSED = "the table of YaRN has each pair twice, and how the kernel of this model reads it was not looked up"


def _trained(config: ConfigRope) -> tuple[int, tuple[str, ...]]:
    """Return the trained length that `RopeParams.from_config` finds, and a note if it is the default."""
    keys = [section.get("original_max_position_embeddings") for section in (config.values, config.section)]
    found = next((int(length) for key in keys if (length := to_finite(key))), None)
    return (
        (1024, ("Without original_max_position_embeddings, the trained length is 1,024.",))
        if found is None
        else (found, ())
    )


def _alpha(config: ConfigRope, scaling: NTK | DynamicNTK) -> Answer:
    alpha = to_finite(config.section.get("alpha"), 1.0)
    if alpha is None:
        return Answer(None, refusal="its alpha is not a number, which is not described here", why="unknown")
    if alpha == 1.0:
        return Answer(config.with_scaling(None), notes=("Dynamic NTK without an alpha scales nothing.",))
    return Answer(config.with_scaling(NTK(alpha)))


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    if config.model_type == "llama":
        return Answer(None, refusal=_FUSED, why="unknown")
    trained, notes = _trained(config)
    scaling = replace(with_mscales(scaling), original_max_position_embeddings=trained)
    return Answer(config.with_scaling(scaling), notes=notes)


def _llama3(config: ConfigRope, scaling: Llama3) -> Answer:
    trained, notes = _trained(config)
    return Answer(config.with_scaling(replace(scaling, original_max_position_embeddings=trained)), notes=notes)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    return Answer(None, refusal="where it gets max_seq_len, which chooses the list, was not looked up", why="unknown")


_ROUNDING = Rounding(
    computed="NumPy's float64 powers, rounded to float32 before the division",
    where="CPU",
    table="float32",
    rotation="float32",
    notes="NumPy computes cos and sin as float32. How the kernels round the rotation by them was not looked up.",
    source=_FILE,
)

TENSORRT_LLM = Engine(
    name="TensorRT-LLM",
    version="51ea5c963",
    rounding=_ROUNDING,
    rules={
        "default": Rule(_FILE, evidence="read"),
        "linear": Rule(_FILE, evidence="read"),
        "ntk": Rule(_FILE, _alpha, frozenset({"alpha"}), evidence="read"),
        "dynamic": Rule(_FILE, _alpha, frozenset({"alpha"}), evidence="read"),
        "yarn": Rule(
            _FILE,
            _yarn,
            MSCALE_KEYS,
            evidence="read",
            rounding=replace(_ROUNDING, computed="float32 powers", notes=_ROUNDING.notes.replace("NumPy", "PyTorch")),
        ),
        "longrope": Rule(_FILE, _longrope, evidence="read"),
        "llama3": Rule(_FILE, _llama3, evidence="read"),
    },
    files="tensorrt_llm",
    serve=shell("trtllm-serve", "", "--max_seq_len"),  # tensorrt_llm/commands/serve.py at 4c05a7489
    unknown="RotaryScalingType.from_string: Unsupported rotary scaling type (ValueError)",
)
