"""Meta's Llama and Hugging Face's: names of tensors, and params.json ↔ config.json.

Source: meta-llama/llama-models at a9c89c47, models/llama3/model.py and args.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ropewalk import _checks
from ropewalk.checkpoints.raw import Tensor
from ropewalk.configs.model_ropes import ModelRopes
from ropewalk.configs.read import from_config
from ropewalk.schemes import Llama3

FREQUENCIES = "rope.freqs"
"""What Meta's older files hold though it can be computed."""

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
_TO_META = {ours: theirs for theirs, ours in (_TOP | _IN_LAYER).items()}
_OLD_BUFFER = "rotary_emb.inv_freq"
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}


def hugging_face_name(name: str) -> str:
    """The name that Hugging Face gives a tensor of Meta's.

    Raises:
        RopeError: it is none of Meta's Llama.
    """
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in _IN_LAYER:
        cure = "Mixtures of experts, adapters and vision layers are not converted between the two formats."
        raise _checks.error("convert", "every tensor must be one of Meta's Llama", name, cure)
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"


def meta_name(name: str) -> str | None:
    """The name that Meta gives a tensor of Hugging Face's Llama; None for one that can be computed.

    Raises:
        RopeError: it is none of Llama.
    """
    if name.endswith(_OLD_BUFFER):
        return None
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    inner = name if match is None else match[2]
    if inner not in _TO_META:
        cure = "Meta's format has no such tensor: convert within Hugging Face's, with --format hf."
        raise _checks.error("convert", "every tensor must be one of Llama", name, cure)
    return _TO_META[inner] if match is None else f"layers.{match[1]}.{_TO_META[inner]}.weight"


def to_hugging_face(
    params: Mapping[str, Any], ropes: ModelRopes, tensors: Mapping[str, Tensor], max_positions: int | None
) -> dict[str, Any]:
    """A config.json of Llama from params.json, and from the shapes of the tensors where it is silent.

    Args:
        params: the content of params.json.
        ropes: what it means.
        tensors: by Meta's names.
        max_positions: `max_position_embeddings`, in tokens, which Meta's format does not carry.

    Raises:
        RopeError: a size is missing, or max_positions is.
    """
    who = "convert"
    if max_positions is None:
        cure = "Pass --max-positions: 2048 for Llama 1, 4096 for 2, 8192 for 3, 131072 from 3.1 on."
        raise _checks.error(who, "max_positions must be given, since params.json does not carry it", "none", cure)
    shapes = {}
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in tensors or len(tensors[name].shape) != 2:
            raise _checks.error(who, f"the checkpoint must hold {name}", "none", "Is it a whole Llama?")
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
        "dtype": _DTYPES[tensors["tok_embeddings.weight"].dtype],
        "rope_theta": rope.base,
    }
    if rope.scaling is not None:
        config["rope_scaling"] = rope.scaling.to_hf()
    return config


_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_params(config: Mapping[str, Any], ropes: ModelRopes) -> dict[str, Any]:
    """A params.json from the config.json of a Llama.

    Raises:
        RopeError: Meta's code has no such model.
    """
    if config.get("model_type") != "llama":
        cure = "Convert within Hugging Face's format, with --format hf."
        raise _checks.error("convert", "Meta's format is for Llama", _checks.shown(config.get("model_type")), cure)
    for key, wanted in _PLAIN.items():
        if config.get(key, wanted) != wanted:
            cure = "Meta's code has nothing else: convert with --format hf."
            raise _checks.error("convert", f"{key} must be {wanted!r}", _checks.shown(config[key]), cure)
    rope, sizes = ropes.rope, {}
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        sizes[key] = _checks.integer("config.json", key, config.get(key), at_least=1)
    dim, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if rope.head_dim * heads != dim or rope.rotary_dim != rope.head_dim:
        must = f"a head must have hidden_size / num_attention_heads = {dim / heads:g} channels, which all rotate"
        raise _checks.error("convert", must, repr(rope), "Meta's code has no other: convert with --format hf.")
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
            cure = "Convert with --format hf."
            raise _checks.error("convert", "Meta's code has no scaling but Llama 3.1's", repr(rope.scaling), cure)
        params |= {"use_scaled_rope": True, "rope_scaling_factor": factor}
    written = from_config(params).rope
    if (written.base, written.scaling, written.head_dim) != (rope.base, rope.scaling, rope.head_dim):
        raise _checks.error("convert", "params.json must be able to say the rope", repr(rope), "Use --format hf.")
    return params


def _feed_forward(dim: int, inner: int) -> tuple[int, float | None]:
    """`multiple_of` and `ffn_dim_multiplier` with which Meta's code comes to a width: two thirds of 4 · dim, times the
    multiplier, up to the next multiple.
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
