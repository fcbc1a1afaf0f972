"""Convert the names of tensors and the config of Meta's format of Llama to Hugging Face's.

Source: meta-llama/llama-models at a9c89c47, models/llama3/model.py and args.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ropewalk import _checks
from ropewalk.configs.model_ropes import ModelRopes
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
