"""Plan a conversion before anything is written, from the headers of the weights and the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk import _checks
from ropewalk._layout import Pairing
from ropewalk.configs import weights
from ropewalk.configs.reader import PAIRING_KEY
from ropewalk.tools.convert import layouts, model
from ropewalk.tools.convert.layouts import Heads, Part
from ropewalk.tools.convert.model import Checkpoint
from ropewalk.tools.convert.raw import Tensor, as_column, reorder

_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
_READ_BY_MODEL = frozenset({"axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla", "youtu"})
"""Models of transformers whose code reads the pairing from the key `rope_interleave` of the config."""
_HEAD = "lm_head.weight"
_MAX_SHARD_BYTES = 5 * 10**9
"""The largest size of a file in bytes, the same as Hugging Face's limit."""


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will write.

    Args:
        source: the checkpoint to convert.
        to: the pairing to write.
        parts: maps the name of each tensor with rotated rows to those rows.
        tensors: maps Hugging Face's name of each tensor to the converted tensor.
        files: maps each file to its tensors, by the names under which they are written.
        metadata: maps each file to its safetensors metadata.
        texts: maps the name of each JSON file to its content.
        notes: what the user must know about the result, in whole sentences.
    """

    source: Checkpoint
    to: Pairing
    parts: Mapping[str, list[Part]]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, Mapping[str, str]]
    texts: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors to write."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())


def plan(source: Checkpoint, to: Pairing) -> Plan:
    """Plan a conversion.

    Args:
        source: the checkpoint to convert.
        to: the pairing to write.

    Raises:
        RopeError: there is nothing to convert, or ropewalk cannot convert the checkpoint.
    """
    if source.pairing == to and source.form != "meta":
        must = f"the weights in {source.folder} must have another pairing than {to!r}"
        fix = "There is nothing to convert, and converting them twice would make them fit neither pairing."
        raise _checks.error("convert", must, f"{source.pairing!r}", fix)
    parts = _find_parts(source)
    tensors = {
        name: tensor if source.pairing == to or name not in parts else _reorder(name, tensor, parts[name], to)
        for name, tensor in source.tensors.items()
    }
    texts, notes = _texts(source, to)
    if source.model_type not in layouts.PROVEN:
        notes.append(
            f"ropewalk's tests run no model of type {source.model_type}. Its heads are assumed to follow one another "
            "in q_proj and k_proj, which its shapes allow. Compare its outputs before you rely on the result."
        )
    files, metadata, more = _files(source, tensors, to)
    return Plan(source, to, parts, tensors, files, metadata, {**texts, **more}, tuple(notes))


def _find_parts(source: Checkpoint) -> dict[str, list[Part]]:
    """Return the rotated rows of each tensor that has any. Raise a RopeError if a layer that rotates lacks q or k."""
    quantised = _quantisation(source.config)
    found: dict[str, list[Part]] = {}
    stacks: dict[str, str] = {}
    layers: set[int] = set()
    tensors = source.tensors
    latent = {name.rpartition(".kv_a_proj_with_mqa.")[0] for name in tensors}
    for name, tensor in tensors.items():
        at = layouts.locate(name)
        if at is None:
            continue
        layers.add(at.layer)
        rope = _rope_of(source, at.layer, name)
        if rope is None or at.name is None:
            continue
        heads = _heads(source, rope, is_latent=name.removesuffix(f".{at.name}") in latent)
        if at.name.endswith(_SCALES):
            if quantised != "fp8":
                _refuse_quantised(f"{name}")
            continue
        parts = layouts.parts(name, tensor.shape, at, heads, source.config)
        if not parts:
            continue
        if tensor.dtype not in (_FLOATS | _FP8 if quantised == "fp8" else _FLOATS):
            _refuse_quantised(f"{name} of {tensor.dtype}")
        found[name] = parts
        stacks[at.stack] = name
    if len(stacks) > 1:
        came = f"{len(stacks)} stacks of layers ({', '.join(sorted(stacks.values())[:3])})"
        fix = "Convert a checkpoint that contains only its text model."
        raise _checks.error("convert", "a checkpoint must hold one text model", came, fix)
    if not found:
        must = f"{source.folder} must hold weights of q or k"
        raise _checks.error("convert", must, "none with known names", "There is nothing to convert in this checkpoint.")
    if source.form != "adapter":
        _check_complete(source, found, layers)
    if quantised == "fp8":
        _check_blocks(source, found)
    return found


def _rope_of(source: Checkpoint, layer: int, name: str) -> Any:
    """Return the rope of a layer.

    Layers that only predict further tokens follow the last layer of the model and have the same rope as that layer.
    """
    ropes = source.ropes.layers
    if layer < len(ropes):
        return ropes[layer]
    further = source.config.get("num_nextn_predict_layers")
    if type(further) is int and layer < len(ropes) + further:
        return ropes[-1]
    must = f"the weights must have as many layers as the config, {len(ropes)}"
    raise _checks.error("convert", must, name, "Use the config that belongs to these weights.")


def _heads(source: Checkpoint, rope: Any, *, is_latent: bool) -> Heads:
    head_keys, width_keys = model.row_keys(source.model_type)
    queries = source.first(head_keys)
    keys = source.first(_KEY_HEADS)
    if source.model_type == "falcon" and not source.config.get("new_decoder_architecture", False):
        keys = 1 if source.config.get("multi_query", True) else queries
    elif all(source.config.get(key) is None for key in _KEY_HEADS):
        keys = queries
    return Heads(
        rope=rope,
        queries=queries,
        keys=keys,
        width=source.first(width_keys),
        latent=source.first(("kv_lora_rank",)) if is_latent else None,
    )


def _reorder(name: str, tensor: Tensor, parts: list[Part], to: Pairing) -> Tensor:
    if all(part.kind == "norm" for part in parts):
        tensor = as_column(tensor)
    return reorder(tensor, layouts.row_order(tensor.rows, parts, to))


def _check_complete(source: Checkpoint, found: Mapping[str, list[Part]], layers: set[int]) -> None:
    have = {(part.layer, part.role) for parts in found.values() for part in parts if part.kind == "proj"}
    for layer, rope in enumerate(source.ropes.layers):
        missing = [role for role in ("q", "k") if rope is not None and (layer, role) not in have]
        if missing or layer not in layers:
            missing_weights = f"weights of {' and '.join(missing)}" if layer in layers else "tensor"
            must = f"the checkpoint must hold the weights of all {len(source.ropes.layers)} layers"
            came = f"no known {missing_weights} of layer {layer}"
            fix = "Download or copy missing files, or use the config that belongs to these weights."
            raise _checks.error("convert", must, came, fix)


def _quantisation(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation of the weights: "fp8", or None if they are not quantised.

    Raises:
        RopeError: the weights have another quantisation, which cannot be converted.
    """
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    if method != "fp8":
        _refuse_quantised(f"quant_method {_checks.shown(method)}")
    return "fp8"


def _refuse_quantised(came: str) -> None:
    must = "q and k must be floating point, or FP8 with a scale for each block"
    fix = "Rows of other quantised formats cannot be reordered, because they share data. Convert before quantising."
    raise _checks.error("convert", must, came, fix)


def _check_blocks(source: Checkpoint, found: Mapping[str, list[Part]]) -> None:
    """Raise a RopeError if an FP8 row would move to another block of rows, because each block has its own scale."""
    quantisation = source.config.get("quantization_config")
    size = quantisation.get("weight_block_size") if isinstance(quantisation, Mapping) else None
    tensors = source.tensors
    for name, parts in found.items():
        if tensors[name].dtype not in _FP8:
            continue
        rows = np.arange(tensors[name].shape[0])
        scale = next((tensors[f"{name}{s}"] for s in ("_scale_inv", "_scale") if f"{name}{s}" in tensors), None)
        if scale is not None and int(np.prod(scale.shape, dtype=object)) == 1:
            continue
        block = size[0] if isinstance(size, list) and size and type(size[0]) is int and size[0] > 0 else 0
        fits = scale is not None and len(scale.shape) == 2 and block and scale.shape[0] == -(-len(rows) // block)
        if not fits:
            _refuse_quantised(f"{name} with a scale of shape {None if scale is None else scale.shape}")
        moved = layouts.row_order(len(rows), parts, "half")
        if (moved // block != rows // block).any():
            _refuse_quantised(f"{name}, whose heads extend across blocks of {block} rows that share a scale")


def _texts(source: Checkpoint, to: Pairing) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON files to write, except the index, and notes about the result for the user."""
    if source.form == "adapter":
        return {model.ADAPTER_CONFIG: source.own_config}, [
            f"The adapter now fits a model whose q and k are {to}. Convert its model in the same way."
        ]
    config = {key: value for key, value in source.config.items() if key != PAIRING_KEY}
    notes = []
    if source.form == "meta":
        notes.append(
            "The tokenizer is not converted, and there is no generation_config.json. Add them, and the ids of the "
            "special tokens to config.json."
        )
        if _HEAD in source.tensors:
            notes.append(
                f"{_HEAD} is written beside the embedding, and config.json states tie_word_embeddings: false, also if "
                "the two are equal, because Meta's format does not say whether they are tied."
            )
    if source.model_type in _READ_BY_MODEL:
        config["rope_interleave"] = to == "interleaved"
        notes.append(
            f"config.json states rope_interleave: {json.dumps(to == 'interleaved')}, which the code of transformers "
            f"for {source.model_type} reads. Other engines, and code inside the model's folder, may not read it."
        )
    elif to != source.native_pairing:
        config[PAIRING_KEY] = to
        notes.append(
            f"Other programs give wrong results with these weights: code for {source.model_type} (transformers, vLLM, "
            f"llama.cpp) always rotates with the pairing {source.native_pairing}. Use the weights with ropewalk or "
            f"with your own code. config.json states {PAIRING_KEY}: {to!r}, which from_config reads."
        )
    return {"config.json": config}, notes


def _files(
    source: Checkpoint, tensors: Mapping[str, Tensor], to: Pairing
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, str]], dict[str, Any]]:
    """Return the tensors of each file, the metadata of each file, and the index of the files if they need one."""
    if source.form != "meta":
        files = {file: {name: tensors[name] for name in names} for file, names in source.files.items()}
        metadata = {file: dict(source.metadata.get(file, {})) for file in files}
        if source.form == "adapter":
            for held in metadata.values():
                held.pop(PAIRING_KEY, None)
                held.update({} if to == source.native_pairing else {PAIRING_KEY: to})
        index = source.folder / weights.INDEX
        return files, metadata, {weights.INDEX: weights.read_index("convert", index)} if index.exists() else {}
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in sorted(tensors.items(), key=lambda item: _sort_key(item[0])):
        if groups[-1] and sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > _MAX_SHARD_BYTES:
            groups.append({})
        groups[-1][name] = tensor
    if len(groups) == 1:
        return {weights.SINGLE: groups[0]}, {weights.SINGLE: {"format": "pt"}}, {}
    files = {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}
    weight_map = {name: file for file, group in files.items() for name in group}
    index_content = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    return files, {file: {"format": "pt"} for file in files}, {weights.INDEX: index_content}


def _sort_key(name: str) -> tuple[int, int, str]:
    """Return a sort key that puts the embedding first, then the layers in order, then all other tensors."""
    at = layouts.locate(name)
    if at is not None:
        return 1, at.layer, name
    return (0 if "embed" in name else 2), 0, name
