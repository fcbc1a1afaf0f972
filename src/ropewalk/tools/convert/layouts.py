"""Find the rows of the heads of q and k in the tensors of an attention module, by the names and shapes of the tensors.

Unknown tensors of an attention module are refused, because the result could be wrong if their rows stayed in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ropewalk import _checks
from ropewalk._layout import Pairing, channels
from ropewalk.rope.rope import Rope

Role = Literal["q", "k"]


@dataclass(frozen=True)
class Part:
    """The rotated rows of all heads of q, or of k, in one tensor.

    Args:
        layer: the index of the layer.
        role: whether these are rows of "q" or of "k".
        kind: "proj" for a projection or its bias, "norm" for the weight or bias of a norm after the projection.
        starts: the first rotated row of each head.
        rotary_dim: the number of rotated rows of each head.
    """

    layer: int
    role: Role
    kind: str
    starts: tuple[int, ...]
    rotary_dim: int


def row_order(rows: int, parts: Iterable[Part], to: Pairing) -> npt.NDArray[np.int64]:
    """Return the permutation that converts the rows of a tensor from the other pairing to `to`.

    Unrotated rows stay in place. The result has shape `[rows]`. Row r of the converted tensor is row `result[r]` of
    the original.
    """
    result = np.arange(rows)
    for part in parts:
        moved = np.array(channels(part.rotary_dim, to))
        for start in part.starts:
            result[start : start + part.rotary_dim] = start + moved
    return result


@dataclass(frozen=True)
class Heads:
    """The sizes of the attention module of one layer.

    Args:
        rope: the rope of the layer.
        queries, keys: the number of heads of q and k. None if the config does not state it.
        width: the number of channels of the model. None if the config does not state it.
        latent: in latent attention, the number of channels of the compressed keys and values, which precede the rotated
            channels of k in one tensor; else None.
    """

    rope: Rope
    queries: int | None
    keys: int | None
    width: int | None
    latent: int | None = None


MAX_NAME = 1000
"""The largest number of characters of a name, which bounds the time of `_NAME`. Real names have about 100."""
_NAME = re.compile(
    r"(?P<stack>.*?)\b(?:layers?|h)\.(?P<layer>\d+)\."
    r"(?:(?P<module>self_attn|attn|attention|self_attention|mixer|temporal_block)\.(?P<rest>.+)|.+)"
)
_NORMS: dict[str, Role] = {
    "q_norm": "q", "query_layernorm": "q", "q_layernorm": "q",
    "k_norm": "k", "key_layernorm": "k", "k_layernorm": "k",
}  # fmt: skip
_UNCHANGED_MODULES = frozenset(
    {"v_proj", "o_proj", "out_proj", "dense", "Wo", "gate_proj", "g_proj", "sinks", "gate_bias", "dense_bias",
     "q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_b_proj", "rotary_emb", "attn_sub_norm", "bias", "masked_bias",
     "attn_out", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "A", "dt_proj",
     "linear_y", "linear_x", "linear_out", "conv_1d", "rg_lru"}
)  # fmt: skip
"""Tensors of an attention module that are copied unchanged. `bias` and `masked_bias` alone are masks of GPT-J and
GPT-NeoX."""
_ROW_PARAMETERS = frozenset(
    {"weight", "bias", "base_layer.bias", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"}
)
"""`base_layer.bias` is in an adapter that was trained with its biases."""
_MAGNITUDE_WEIGHT = "lora_magnitude_vector.weight"
_UNCHANGED_PARAMETERS = frozenset({"lora_A.weight"})


def _starts_by_role(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Return the first row of each head in a tensor with all heads of q, then of k, then of v (Phi-3, ModernBERT)."""
    return {"q": [i * head for i in range(queries)], "k": [(queries + i) * head for i in range(keys)]}


def _starts_by_head(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Return the first row of each head in a tensor that holds q, k and v of head 0, then of head 1, ... (GPT-NeoX)."""
    return {"q": [3 * i * head for i in range(queries)], "k": [(3 * i + 1) * head for i in range(queries)]}


def _starts_by_group(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Return the first row of each head in a tensor that consists of groups (Falcon's new decoder).

    A group holds the heads of q that share a head of k, then that head of k, then its head of v.
    """
    group_size = queries // keys
    group = [(i * (group_size + 2)) * head for i in range(keys)]
    return {"q": [g + j * head for g in group for j in range(group_size)], "k": [g + group_size * head for g in group]}


def _starts_of_codegen(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Return the first row of each head in a tensor of four blocks, each a quarter of q, of v and of k (CodeGen)."""
    quarter = queries // 4
    starts = [block * 3 * quarter + i for block in range(4) for i in range(quarter)]
    return {"q": [s * head for s in starts], "k": [(s + 2 * quarter) * head for s in starts]}


def _starts_of_falcon(config: Mapping[str, Any]) -> Callable[[int, int, int], dict[Role, list[int]]]:
    if config.get("new_decoder_architecture", False):
        return _starts_by_group
    return _starts_by_role if config.get("multi_query", True) else _starts_by_head


_Fusion = Callable[[Mapping[str, Any]], Callable[[int, int, int], dict[Role, list[int]]]]
FUSED: dict[str, tuple[str, _Fusion]] = {
    "phi3": ("qkv_proj", lambda config: _starts_by_role),
    "modernbert": ("Wqkv", lambda config: _starts_by_role),
    "molmo2_text": ("att_proj", lambda config: _starts_by_role),
    "nomic_bert": ("Wqkv", lambda config: _starts_by_role),
    "jina_embeddings_v3": ("Wqkv", lambda config: _starts_by_role),
    "gte": ("qkv_proj", lambda config: _starts_by_role),
    "gpt_neox": ("query_key_value", lambda config: _starts_by_head),
    "gpt_neox_japanese": ("query_key_value", lambda config: _starts_by_head),
    "persimmon": ("query_key_value", lambda config: _starts_by_head),
    "falcon": ("query_key_value", _starts_of_falcon),
    "codegen": ("qkv_proj", lambda config: _starts_of_codegen),
}
"""Maps a model_type to the tensor that holds q, k and v, and to their order in it, as transformers splits it."""
_GATED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Models whose q_proj contains a gate after each head."""


@dataclass(frozen=True)
class Location:
    """The location of a tensor in a model.

    Args:
        stack: the part of the tensor's name before the layers, e.g. "model.".
        layer: the index of the tensor's layer.
        name: the tensor's name inside the attention module, e.g. "q_proj.weight"; None if it is in another module.
    """

    stack: str
    layer: int
    name: str | None


_TESTED = (
    "afmoe apertus arcee aria_text axk1 bamba beam bitnet codegen cohere cohere2 cohere2_moe cwm deepseek_v2 "
    "deepseek_v3 diffllama doge dots1 ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe falcon falcon_h1 flex_olmo "
    "gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss gptj "
    "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hyperclovax jais2 jina_embeddings_v3 kolibri1 laguna lara_mini lfm2 lfm2_moe llama "
    "llama4_text mellum minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral modernbert modernbert-decoder "
    "molmo2_text nemotron nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter persimmon phi phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma sarvam_mla seed_oss smollm3 solar_open stablelm "
    "starcoder2 ultrabert vaultgemma youtu "
)
PROVEN = frozenset(_TESTED.split())
"""The model_types for which tests compare the logits of converted weights, with the code of transformers."""


def locate(name: str) -> Location | None:
    """Return the location of a tensor with this name, or None if it is not in a layer.

    Raises:
        RopeError: the name is longer than any real name.
    """
    if len(name) > MAX_NAME:
        must = f"the name of a tensor must have at most {MAX_NAME} characters"
        raise _checks.error("convert", must, _checks.shown(name), _OTHER_CONFIG)
    match = _NAME.fullmatch(name)
    return None if match is None else Location(match["stack"], int(match["layer"]), match["rest"])


def parts(name: str, shape: tuple[int, ...], at: Location, heads: Heads, config: Mapping[str, Any]) -> list[Part]:
    """Return the rotated rows of a tensor of an attention module, or [] if none are rotated.

    Args:
        name, shape: the name and shape of the tensor.
        at: the location of the tensor.
        heads: the sizes of the attention module.
        config: the config of the model.

    Raises:
        RopeError: the tensor is unknown, or its shape does not fit the config.
    """
    module, _, parameter = (at.name or "").partition(".")
    fused, fusion = FUSED.get(str(config.get("model_type")), ("", None))
    if module in _UNCHANGED_MODULES or parameter in _UNCHANGED_PARAMETERS:
        return []
    if module in _NORMS:
        return _norm(name, shape, at.layer, _NORMS[module], parameter, heads)
    latent = module in ("q_b_proj", "kv_a_proj_with_mqa") or (module == "q_proj" and heads.latent is not None)
    if not latent and module not in ("q_proj", "k_proj", fused):
        fix = "Its rows may have to move as well. Open an issue with the name of the model."
        raise _checks.error("convert", "every tensor of an attention must be known", name, fix)
    if parameter not in _ROW_PARAMETERS and parameter != _MAGNITUDE_WEIGHT:
        fix = "Its rows cannot be reordered. If it belongs to quantised weights, convert before quantising."
        raise _checks.error("convert", "q and k must be plain weights, or those of a LoRA adapter", name, fix)
    rope, whole = heads.rope, heads.rope.head_dim
    queries, keys = _check_counts(name, heads)
    role: Role = "k" if module in ("k_proj", "kv_a_proj_with_mqa") else "q"
    stride, count = whole, queries if role == "q" else keys
    if module == "kv_a_proj_with_mqa":
        rows = None if heads.latent is None else heads.latent + rope.rotary_dim
    elif fusion is not None and module == fused:
        if queries is None or keys is None:
            must = f"the config must state the number of heads of {name}"
            raise _checks.error("convert", must, "none", "Add num_attention_heads and num_key_value_heads.")
        rows = (queries + 2 * (queries if fusion(config) in (_starts_by_head, _starts_of_codegen) else keys)) * whole
    else:
        stride = 2 * whole if role == "q" and config.get("model_type") in _GATED else whole
        count = count if count is not None else shape[0] // stride if shape else 0
        rows = count * stride
    if not shape or 0 in shape or shape[0] != rows or (len(shape) == 2) != (parameter in ("weight", "lora_B.weight")):
        _refuse_shape(name, shape, f"{rows or 'other'} rows")
    starts: dict[Role, list[int]]
    if module == "kv_a_proj_with_mqa":
        starts = {"k": [(heads.latent or 0) - rope.rotary_offset]}
    elif fusion is not None and module == fused:
        starts = fusion(config)(queries or 0, keys or 0, whole)
    else:
        starts = {role: [i * stride for i in range(count or 0)]}
    if parameter == "weight" and module != "q_b_proj" and heads.width is not None and shape[1] != heads.width:
        _refuse_shape(name, shape, f"{heads.width} columns")
    return [
        Part(at.layer, role, "proj", tuple(s + rope.rotary_offset for s in role_starts), rope.rotary_dim)
        for role, role_starts in starts.items()
    ]


def _norm(name: str, shape: tuple[int, ...], layer: int, role: Role, parameter: str, heads: Heads) -> list[Part]:
    """Return the rotated rows of the weight or bias of a norm of q or k.

    The tensor has head_dim numbers that all heads share, or head_dim numbers for each head.
    """
    rope, numbers = heads.rope, int(np.prod(shape, dtype=object))
    if match := re.fullmatch(r"norms\.\d+\.(weight|bias)", parameter):  # StableLM has a norm for each head
        parameter = match[1]
    count = heads.queries if role == "q" else heads.keys
    fits = numbers == rope.head_dim or (count is not None and numbers == count * rope.head_dim)
    if parameter not in ("weight", "bias") or not fits or heads.latent is not None:
        _refuse_shape(name, shape, f"{rope.head_dim} numbers for each head")
    starts = range(rope.rotary_offset, numbers, rope.head_dim)
    return [Part(layer, role, "norm", tuple(starts), rope.rotary_dim)]


def _check_counts(name: str, heads: Heads) -> tuple[int | None, int | None]:
    """Check and return the numbers of heads of q and k. Each is None if the config does not state it."""
    queries, keys = heads.queries, heads.keys
    if any(count is not None and count < 1 for count in (queries, keys, heads.latent)):
        must = f"the config must state sizes of at least 1 for {name}"
        came = f"{queries} heads of q, {keys} heads of k, kv_lora_rank {heads.latent}"
        raise _checks.error("convert", must, came, _OTHER_CONFIG)
    if queries is not None and keys is not None and queries % keys:
        must, came = f"the number of heads of q must be a multiple of that of k for {name}", f"{queries} and {keys}"
        raise _checks.error("convert", must, came, _OTHER_CONFIG)
    return queries, keys


_OTHER_CONFIG = "Use the config that belongs to these weights."


def _refuse_shape(name: str, shape: tuple[int, ...], expected: str) -> None:
    raise _checks.error("convert", f"{name} must have {expected} by its config", f"the shape {shape}", _OTHER_CONFIG)
