"""Convert the names of tensors and the config between Meta's format of Llama and Hugging Face's.

Source: meta-llama/llama-models at a9c89c47, models/llama3/model.py and args.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ropewalk import _checks
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import from_config
from ropewalk.schemes import Llama3
from ropewalk.tools.convert.raw import Tensor

FREQUENCIES = "rope.freqs"
"""A tensor in Meta's older files that is not converted, because Hugging Face's code computes it."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of Meta's format, by their names in safetensors."""
_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TO_META = {hugging_face: meta for meta, hugging_face in (_TOP | _IN_LAYER).items()}
_OLD_BUFFER = "rotary_emb.inv_freq"
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor of Meta's Llama.

    Raises:
        RopeError: Meta's Llama has no tensor of this name.
    """
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _IN_LAYER:
        fix = "Mixtures of experts, adapters and vision layers cannot be converted between the two formats."
        raise _checks.error("convert", "every tensor must belong to Meta's Llama", name, fix)
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def meta_name(name: str) -> str | None:
    """Return Meta's name of a tensor of Hugging Face's Llama, or None for a tensor that Meta's code computes.

    Raises:
        RopeError: Llama has no tensor of this name.
    """
    if name.endswith(_OLD_BUFFER):
        return None
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    inner = name if match is None else match[2]
    if inner not in _TO_META:
        fix = "Meta's format has no such tensor. Use --format hf."
        raise _checks.error("convert", "every tensor must belong to a Llama", name, fix)
    return _TO_META[inner] if match is None else f"layers.{match[1]}.{_TO_META[inner]}.weight"


def to_hugging_face(
    params: Mapping[str, Any], ropes: ModelRopes, tensors: Mapping[str, Tensor], max_positions: int | None
) -> dict[str, Any]:
    """Return the config.json of a Llama, computed from params.json and from the shapes of the tensors.

    Args:
        params: the content of params.json.
        ropes: the ropes of params.json.
        tensors: the tensors by Meta's names.
        max_positions: `max_position_embeddings` in tokens, which Meta's format does not contain.

    Raises:
        RopeError: max_positions, a size or a tensor is missing or invalid.
    """
    who = "convert"
    if max_positions is None:
        fix = "Pass --max-positions: 2048 for Llama 1, 4096 for 2, 8192 for 3, 131072 from 3.1 on."
        raise _checks.error(who, "max_positions must be passed, because params.json does not contain it", "none", fix)
    shapes = {}
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in tensors or len(tensors[name].shape) != 2:
            raise _checks.error(who, f"the checkpoint must hold {name}", "none", "Pass a complete Llama.")
        shapes[name] = tensors[name].shape
    rope, heads = ropes.rope, _checks.integer("params.json", "n_heads", params.get("n_heads"), at_least=1)
    keys = params.get("n_kv_heads")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["tok_embeddings.weight"][0],
        "hidden_size": _checks.integer("params.json", "dim", params.get("dim"), at_least=1),
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "num_hidden_layers": len(ropes.layers),
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if keys is None
        else _checks.integer("params.json", "n_kv_heads", keys, at_least=1),
        "head_dim": rope.head_dim,
        "max_position_embeddings": _checks.length(who, "max_positions", max_positions),
        "rms_norm_eps": _checks.number("params.json", "norm_eps", params.get("norm_eps"), above=0.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": DTYPES[tensors["tok_embeddings.weight"].dtype],
        "rope_theta": rope.base,
    }
    if rope.scaling is not None:
        config["rope_scaling"] = rope.scaling.to_hf()
    return config


def to_params(config: Mapping[str, Any], ropes: ModelRopes) -> dict[str, Any]:
    """Return the params.json of a Llama, computed from its config.json.

    Raises:
        RopeError: Meta's code does not support this model.
    """
    if config.get("model_type") != "llama":
        must, fix = "the model must be a Llama for Meta's format", "Use --format hf."
        raise _checks.error("convert", must, _checks.shown(config.get("model_type")), fix)
    for key, required in _PLAIN.items():
        if config.get(key, required) != required:
            fix = "Meta's code supports no other value. Use --format hf."
            raise _checks.error("convert", f"{key} must be {required!r}", _checks.shown(config[key]), fix)
    rope, sizes = ropes.rope, {}
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        sizes[key] = _checks.integer("config.json", key, config.get(key), at_least=1)
    dim, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if rope.head_dim * heads != dim or rope.rotary_dim != rope.head_dim:
        must = f"a head must have hidden_size / num_attention_heads = {dim / heads:g} channels, all rotated"
        raise _checks.error("convert", must, repr(rope), "Meta's code supports no other heads. Use --format hf.")
    multiple, multiplier = _feed_forward(dim, sizes["intermediate_size"])
    params: dict[str, Any] = {
        "dim": dim,
        "n_layers": len(ropes.layers),
        "n_heads": heads,
        "n_kv_heads": heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
        "vocab_size": sizes["vocab_size"],
        "multiple_of": multiple,
        **({} if multiplier is None else {"ffn_dim_multiplier": multiplier}),
        "norm_eps": _checks.number("config.json", "rms_norm_eps", config.get("rms_norm_eps", 1e-6), above=0.0),
        "rope_theta": rope.base,
    }
    if rope.scaling is not None:
        factor = getattr(rope.scaling, "factor", 1.0)
        of_meta = Llama3(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
        if rope.scaling != of_meta:
            must, fix = "the scaling must be Llama 3.1's for Meta's format", "Use --format hf."
            raise _checks.error("convert", must, repr(rope.scaling), fix)
        params |= {"use_scaled_rope": True, "rope_scaling_factor": factor}
    written = from_config(params).rope
    if (written.base, written.scaling, written.head_dim) != (rope.base, rope.scaling, rope.head_dim):
        raise _checks.error("convert", "params.json must be able to state the rope", repr(rope), "Use --format hf.")
    return params


def _feed_forward(dim: int, inner: int) -> tuple[int, float | None]:
    """Return a `multiple_of` and a `ffn_dim_multiplier` from which Meta's code computes the width `inner`.

    Meta's formula is two thirds of 4 · dim, times the multiplier, rounded up to a multiple of `multiple_of`. The
    multiplier is None if the formula gives `inner` without one.
    """
    usual = int(2 * (4 * dim) / 3)
    multiple = math.gcd(inner, 4096)
    for candidate in (256, multiple):
        if -(-usual // candidate) * candidate == inner:
            return candidate, None
    multiplier = inner / usual
    while int(multiplier * usual) > inner or -(-int(multiplier * usual) // multiple) * multiple < inner:
        multiplier = math.nextafter(multiplier, math.inf if int(multiplier * usual) < inner else 0.0)
    return multiple, multiplier
