"""Which rows of which tensors are heads of q and of k: by the names and shapes of a model's attention.

A tensor beside q and k that nobody knows is refused: left where it is, it could be what makes the result wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ropewalk import _checks
from ropewalk._layout import Pairing
from ropewalk.rope import Rope

Role = Literal["q", "k"]


@dataclass(frozen=True)
class Part:
    """The rotated rows of q or of k in a tensor.

    Args:
        layer: its number, from 0.
        role: "q" or "k".
        kind: "proj" (a matrix, or what is added to its output), "norm" (what multiplies or is added afterwards).
        starts: the first rotated row of each head.
        rotary_dim: how many rows of a head rotate.
    """

    layer: int
    role: Role
    kind: str
    starts: tuple[int, ...]
    rotary_dim: int


def channels(rotary_dim: int, to: Pairing) -> npt.NDArray[np.int64]:
    """Where the rotated channels of a head come from: channel c of the pairing `to` is channel `[c]` of the other."""
    by_pairs = np.arange(rotary_dim).reshape(-1, 2)
    return by_pairs.T.ravel() if to == "half" else np.arange(rotary_dim).reshape(2, -1).T.ravel()


def order(rows: int, parts: Iterable[Part], to: Pairing) -> npt.NDArray[np.int64]:
    """Where each row of a tensor comes from: rows in which no head rotates stay."""
    result = np.arange(rows)
    for part in parts:
        moved = channels(part.rotary_dim, to)
        for start in part.starts:
            result[start : start + part.rotary_dim] = start + moved
    return result


@dataclass(frozen=True)
class Heads:
    """Sizes of the attention in one layer.

    Args:
        rope: what rotates its q and k.
        queries, keys: how many heads of each; None where the config does not say.
        width: channels of the model; None where the config does not say.
        latent: channels of the compressed keys and values before the rotated part of k, in latent attention.
    """

    rope: Rope
    queries: int | None
    keys: int | None
    width: int | None
    latent: int | None = None


_NAME = re.compile(
    r"(?P<stack>.*?)\b(?:layers?|h)\.(?P<layer>\d+)\."
    r"(?:(?P<module>self_attn|attn|attention|self_attention|mixer|temporal_block)\.(?P<rest>.+)|.+)"
)
_NORMS: dict[str, Role] = {
    "q_norm": "q", "query_layernorm": "q", "q_layernorm": "q",
    "k_norm": "k", "key_layernorm": "k", "k_layernorm": "k",
}  # fmt: skip
_STILL = frozenset(
    {"v_proj", "o_proj", "out_proj", "dense", "Wo", "gate_proj", "g_proj", "sinks", "gate_bias", "dense_bias",
     "q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_b_proj", "rotary_emb", "attn_sub_norm", "bias", "masked_bias",
     "attn_out", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "A", "dt_proj",
     "linear_y", "linear_x", "linear_out", "conv_1d", "rg_lru"}
)  # fmt: skip
"""Tensors of an attention that keep their rows. `bias` and `masked_bias` alone are masks of GPT-J and GPT-NeoX."""
_BY_OUTPUT = frozenset({"weight", "bias", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"})
_BY_OUTPUT_TOO = "lora_magnitude_vector.weight"
_ADAPTER_STILL = frozenset({"lora_A.weight"})


def _concatenated(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """All heads of q, then those of k, then those of v (Phi-3, ModernBERT, Nomic, Molmo 2)."""
    return {"q": [i * head for i in range(queries)], "k": [(queries + i) * head for i in range(keys)]}


def _each(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Head by head: its q, its k, its v (GPT-NeoX, Persimmon)."""
    return {"q": [3 * i * head for i in range(queries)], "k": [(3 * i + 1) * head for i in range(queries)]}


def _grouped(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Group by group: the heads of q that share a k, that k, its v (Falcon's new decoder)."""
    share = queries // keys
    group = [(i * (share + 2)) * head for i in range(keys)]
    return {"q": [g + j * head for g in group for j in range(share)], "k": [g + share * head for g in group]}


def _codegen(queries: int, keys: int, head: int) -> dict[Role, list[int]]:
    """Four blocks, each of a quarter of q, of v and of k."""
    quarter = queries // 4
    starts = [block * 3 * quarter + i for block in range(4) for i in range(quarter)]
    return {"q": [s * head for s in starts], "k": [(s + 2 * quarter) * head for s in starts]}


def _falcon(config: Mapping[str, Any]) -> Callable[[int, int, int], dict[Role, list[int]]]:
    if config.get("new_decoder_architecture", False):
        return _grouped
    return _concatenated if config.get("multi_query", True) else _each


_Fusion = Callable[[Mapping[str, Any]], Callable[[int, int, int], dict[Role, list[int]]]]
FUSED: dict[str, tuple[str, _Fusion]] = {
    "phi3": ("qkv_proj", lambda config: _concatenated),
    "modernbert": ("Wqkv", lambda config: _concatenated),
    "molmo2_text": ("att_proj", lambda config: _concatenated),
    "nomic_bert": ("Wqkv", lambda config: _concatenated),
    "jina_embeddings_v3": ("Wqkv", lambda config: _concatenated),
    "gte": ("qkv_proj", lambda config: _concatenated),
    "gpt_neox": ("query_key_value", lambda config: _each),
    "gpt_neox_japanese": ("query_key_value", lambda config: _each),
    "persimmon": ("query_key_value", lambda config: _each),
    "falcon": ("query_key_value", _falcon),
    "codegen": ("qkv_proj", lambda config: _codegen),
}
"""model_type → the tensor that holds q, k and v, and in which order, as transformers 5.23 takes it apart."""
_GATED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Models in whose q_proj a gate stands behind each head."""


@dataclass(frozen=True)
class Place:
    """Where a tensor stands: what is before its layers, the number of its layer, and its name in the attention."""

    stack: str
    layer: int
    rest: str | None


_RUN = (
    "afmoe apertus arcee aria_text axk1 bamba beam bitnet codegen cohere cohere2 cohere2_moe cwm deepseek_v2 "
    "deepseek_v3 diffllama doge dots1 ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe falcon falcon_h1 flex_olmo "
    "gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss gptj "
    "granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hyperclovax jais2 jina_embeddings_v3 kolibri1 laguna lfm2 lfm2_moe llama llama4_text "
    "mellum minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral modernbert modernbert-decoder "
    "molmo2_text nemotron nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter persimmon phi phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open stablelm "
    "starcoder2 ultrabert vaultgemma youtu "
)
PROVEN = frozenset(_RUN.split())
"""Models whose converted weights gave the same logits in the code of transformers 5.23, run by tests/checkpoints."""


def place(name: str) -> Place | None:
    """The place of a tensor; None for one that is in no layer. `rest` is None for one that is in no attention."""
    match = _NAME.fullmatch(name)
    return None if match is None else Place(match["stack"], int(match["layer"]), match["rest"])


def parts(name: str, shape: tuple[int, ...], at: Place, heads: Heads, config: Mapping[str, Any]) -> list[Part]:
    """The rotated rows of one tensor of an attention; [] where none are.

    Args:
        name, shape: of the tensor.
        at: its place, in an attention.
        heads: the sizes of that layer.
        config: of the model.

    Raises:
        RopeError: nobody knows the tensor, or its shape does not fit the config.
    """
    module, _, parameter = (at.rest or "").partition(".")
    fused, fusion = FUSED.get(str(config.get("model_type")), ("", None))
    if module in _STILL or parameter in _ADAPTER_STILL:
        return []
    if module in _NORMS:
        return _norm(name, shape, at.layer, _NORMS[module], parameter, heads)
    latent = module in ("q_b_proj", "kv_a_proj_with_mqa") or (module == "q_proj" and heads.latent is not None)
    if not latent and module not in ("q_proj", "k_proj", fused):
        cure = "Its rows may have to move too: open an issue with the model's name."
        raise _checks.error("convert", "every tensor of an attention must be one that is known", name, cure)
    if parameter not in _BY_OUTPUT and parameter != _BY_OUTPUT_TOO:
        cure = "Convert the weights before they are quantised."
        raise _checks.error("convert", "q and k must be plain weights, or those of a LoRA adapter", name, cure)
    rope, whole = heads.rope, heads.rope.head_dim
    queries, keys = _counted(name, heads)
    role: Role = "k" if module in ("k_proj", "kv_a_proj_with_mqa") else "q"
    stride, count = whole, queries if role == "q" else keys
    if module == "kv_a_proj_with_mqa":
        rows = None if heads.latent is None else heads.latent + rope.rotary_dim
    elif fusion is not None and module == fused:
        if queries is None or keys is None:
            must = f"the config must say how many heads {name} has"
            raise _checks.error("convert", must, "nothing about it", "Add num_attention_heads and num_key_value_heads.")
        rows = (queries + 2 * (queries if fusion(config) in (_each, _codegen) else keys)) * whole
    else:
        stride = 2 * whole if role == "q" and config.get("model_type") in _GATED else whole
        count = count if count is not None else shape[0] // stride if shape else 0
        rows = count * stride
    if not shape or not rows or shape[0] != rows or (len(shape) == 2) != (parameter in ("weight", "lora_B.weight")):
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
        Part(at.layer, role, "proj", tuple(s + rope.rotary_offset for s in found), rope.rotary_dim)
        for role, found in starts.items()
    ]


def _norm(name: str, shape: tuple[int, ...], layer: int, role: Role, parameter: str, heads: Heads) -> list[Part]:
    """Weights of a norm over each head, the same for all or one for each, or over all heads at once."""
    rope, numbers = heads.rope, int(np.prod(shape, dtype=object))
    if one := re.fullmatch(r"norms\.\d+\.(weight|bias)", parameter):  # StableLM has a norm for each head
        parameter = one[1]
    count = heads.queries if role == "q" else heads.keys
    fits = numbers == rope.head_dim or (count is not None and numbers == count * rope.head_dim)
    if parameter not in ("weight", "bias") or not fits or heads.latent is not None:
        _refuse_shape(name, shape, f"{rope.head_dim} numbers for each head")
    starts = range(rope.rotary_offset, numbers, rope.head_dim)
    return [Part(layer, role, "norm", tuple(starts), rope.rotary_dim)]


def _counted(name: str, heads: Heads) -> tuple[int | None, int | None]:
    """The numbers of heads, as far as the config says them: at least 1, and each k for as many q as every other."""
    queries, keys = heads.queries, heads.keys
    if any(count is not None and count < 1 for count in (queries, keys, heads.latent)):
        must, came = f"the config must say sizes of at least 1 for {name}", f"{queries}, {keys}, {heads.latent}"
        raise _checks.error("convert", must, came, "Is it the config of these weights?")
    if queries is not None and keys is not None and queries % keys:
        must, came = f"the number of heads of q must be a multiple of that of k for {name}", f"{queries} and {keys}"
        raise _checks.error("convert", must, came, "Is it the config of these weights?")
    return queries, keys


def _refuse_shape(name: str, shape: tuple[int, ...], wanted: str) -> None:
    cure = "Is it the config of these weights?"
    raise _checks.error("convert", f"{name} must have {wanted} by its config", f"the shape {shape}", cure)
