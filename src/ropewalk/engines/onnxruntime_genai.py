"""The rules of ONNX Runtime GenAI: its model builder writes tables of cos and sin into the ONNX model.

It reads a config with AutoConfig of transformers. The class of a model decides which schemes are read.
"""

from __future__ import annotations

from typing import Any

from ropewalk.engines._config import ConfigRope, to_finite
from ropewalk.engines._engine import (
    MSCALE_KEYS,
    NO_LENGTH,
    Answer,
    Engine,
    Rounding,
    Rule,
    longrope,
    yarn_inside_of_pairs,
    yarn_magnitude,
)
from ropewalk.schemes import NTK, Linear, Llama3, LongRoPE, YaRN

_FOLDER = "models/builders"
_ONE_SCHEME = {
    **dict.fromkeys(("llama", "smollm3"), Llama3),
    "phi3": LongRoPE,
    "hunyuan_v1_dense": NTK,
}
"""The model_types whose class replaces the base class's method for schemes, and the only scheme that it then reads."""


def _answer(config: ConfigRope, scaling: Any) -> Answer:
    """Return the rope of the class of the model."""
    if config.nested:
        return Answer(None, refusal="it reads no rope_parameters for each kind of layer (KeyError: 'rope_type')")
    if scaling is None:
        return Answer(config.rope)
    own = _ONE_SCHEME.get(config.model_type)
    if own is not None and not isinstance(scaling, own):
        note = "Its class for this model reads another scheme only, and drops this one without a warning."
        return Answer(config.with_scaling(None), notes=(note,))
    if isinstance(scaling, YaRN):
        return _yarn(config, scaling)
    if own is LongRoPE:
        return _longrope(config, scaling)
    if isinstance(scaling, NTK) and config.section.get("factor") is None:
        return Answer(None, refusal="transformers requires factor, although nothing uses it (KeyError: 'factor')")
    if own is not None or isinstance(scaling, Linear):
        return Answer(config.rope)
    return Answer(None, refusal="its class for this model does not know the scheme (NotImplementedError)")


def _yarn(config: ConfigRope, scaling: YaRN) -> Answer:
    betas = [to_finite(config.section.get(key), 0.0) for key in ("beta_fast", "beta_slow")]
    if not all(betas):
        return Answer(None, refusal="it needs beta_fast and beta_slow in the scaling (ZeroDivisionError)")
    if config.rope.rotary_dim != config.rope.head_dim:
        return Answer(None, refusal="its ramp of YaRN has a position for each pair of the whole head (RuntimeError)")
    factor = yarn_magnitude(scaling.factor)
    notes: tuple[str, ...] = ()
    if scaling.mscale and scaling.mscale_all_dim:
        factor = yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
    elif scaling.mscale:
        factor = scaling.mscale
        notes = ("If only mscale is given, it is the attention factor.",)
    if scaling.truncate:
        notes += ("It does not round the ramp.",)
    return yarn_inside_of_pairs(config, scaling, factor, notes)


def _longrope(config: ConfigRope, scaling: LongRoPE) -> Answer:
    if "type" not in config.section:
        return Answer(None, refusal="it needs the key type besides rope_type (KeyError: 'type')")
    if config.longest is None:
        return Answer(None, refusal=NO_LENGTH)
    if config.longest == scaling.original_max_position_embeddings:
        return Answer(None, refusal="without a longer context it does not know the scheme (NotImplementedError)")
    return _LONGROPE(config, scaling)


_LONGROPE = longrope(
    "the call",
    "The list is chosen in each call: the long one if the sequence has more than {length} tokens.",
    mscales=True,
)


_RULE = Rule(f"{_FOLDER}/base.py", _answer)
_MSCALES = frozenset({"short_factor", "long_factor", "short_mscale", "long_mscale"})

ONNXRUNTIME_GENAI = Engine(
    name="onnxruntime-genai",
    version="0.18.0",
    rounding=Rounding(
        where="CPU",
        notes="The tables have the dtype of the model's inputs and outputs. CUDA's kernel rotates in it as well.",
        source=f"{_FOLDER}/base.py, onnxruntime/contrib_ops/cuda/bert/rotary_embedding_impl.cu",
    ),
    rules={
        "default": _RULE,
        "linear": _RULE,
        "ntk": Rule(f"{_FOLDER}/hunyuan.py", _answer, frozenset({"alpha", "factor"})),
        "dynamic": _RULE,
        "yarn": Rule(f"{_FOLDER}/base.py", _answer, MSCALE_KEYS | {"truncate"}),
        "longrope": Rule(f"{_FOLDER}/phi.py", _answer, _MSCALES),
        "llama3": Rule(f"{_FOLDER}/llama.py", _answer),
        "proportional": _RULE,
    },
    files="onnxruntime_genai",
    reads_by_transformers="models/builder.py",
    unknown="its builder does not know the scheme (NotImplementedError)",
)
