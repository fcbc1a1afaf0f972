"""Export a lab model to Hugging Face's Llama or to llama2.c's binary file, and import Hugging Face's Llama.

Existing files are replaced only with `force`, and only after the new files are complete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks
from ropewalk.tools.lab import checkpoint, files, tokenizer
from ropewalk.tools.lab.model import LanguageModel, Size, shapes

_PREFIX = "model."
"""Prefix of the parameter names of Hugging Face's LlamaForCausalLM. The head has no prefix."""
_HEAD = "lm_head.weight"

_BYTES = 256
"""Vocabulary size of a byte model, for which a tokenizer is exported."""

_FOLDER = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LONGEST = 2**24
"""Maximum number of positions. No lab model has that many. It limits the memory of cos and sin tables."""


def to_hugging_face(
    model: LanguageModel, rope: ropewalk.Rope, folder: Path, *, max_positions: int, force: bool = False
) -> None:
    """Write config.json and model.safetensors for `LlamaForCausalLM.from_pretrained(folder)`.

    For a byte model (256 tokens), tokenizer.json and tokenizer_config.json are written as well.
    `AutoTokenizer.from_pretrained(folder)` then converts text to its UTF-8 bytes and back.

    Args:
        model: a model without absolute positions.
        rope: the rope of the model. With pairing "interleaved", the rows of q_proj and k_proj are reordered. NTK is
            written as a larger base, which gives the same rope. Dynamic NTK and other schemes are written unchanged.
        folder: a new or empty folder. All files appear in it at once.
        max_positions: `max_position_embeddings` of the config, in tokens: the length that the model is made for.
        force: whether to replace a folder that contains only files with these names.

    Raises:
        RopeError: Hugging Face's Llama cannot represent this model, the folder is not empty, or it cannot be written.
    """
    size = model.size
    _check_exportable("to_hugging_face", model, rope)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": _checks.integer(
            "to_hugging_face", "max_positions", max_positions, at_least=1, at_most=_LONGEST
        ),
        "rms_norm_eps": size.norm_eps,
        "tie_word_embeddings": size.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
        "rope_theta": rope.base,
    }
    layers = (replace(_as_base(rope), pairing="half"),) * size.num_layers
    config = replace(ropewalk.from_config(config), layers=layers).to_hf_config(version=5)
    if ropewalk.from_config(config).layers != layers:
        raise _checks.error(
            "to_hugging_face",
            "a Llama config must be able to represent the rope",
            repr(rope),
            "A Llama config has no partial rotation, and dynamic NTK only if max_positions is its original length.",
        )
    weights = dict(_reordered_weights(model, rope.pairing, "half"))
    if size.tied:
        del weights[_HEAD]
    named = {name if name == _HEAD else _PREFIX + name: weight for name, weight in weights.items()}
    texts = {"config.json": config}
    if size.vocab_size == _BYTES:
        texts |= tokenizer.hugging_face(max_positions)
    with files.new_folder("to_hugging_face", folder, force=force, replaceable=_FOLDER) as new:
        files.write_tensors(new / "model.safetensors", named, {"format": "pt"})
        for name, content in texts.items():
            (new / name).write_text(json.dumps(content, indent=2) + "\n")


def from_hugging_face(folder: Path) -> tuple[LanguageModel, ropewalk.Rope]:
    """Read config.json and model.safetensors of Hugging Face's Llama, and convert the weights to float32.

    Returns:
        The model, and the rope of every layer. If the rope depends on the length, call `Rope.at_length`.

    Raises:
        RopeError: the model has features that a `LanguageModel` lacks (biases, another activation), or a key or tensor
            is missing.
        FileNotFoundError: one of the two files is missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as e:
        must = f"{folder / 'config.json'} must be JSON"
        raise _checks.error("from_hugging_face", must, str(e), "Export the model again.") from e
    rope = ropewalk.from_config(config).rope
    required = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in required.items():
        if config.get(key, value) != value:
            fix = "A LanguageModel supports nothing else."
            raise _checks.error("from_hugging_face", f"{key} must be {value!r}", repr(config[key]), fix)
    try:
        size = Size(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads"),
            norm_eps=config["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", False),
        )
    except KeyError as e:
        raise _checks.error("from_hugging_face", f"config.json must state {e}", "no such key", "Add it.") from e
    if rope.head_dim != size.head_dim:
        raise _checks.error(
            "from_hugging_face",
            f"head_dim must be hidden_size / num_attention_heads = {size.head_dim}",
            str(rope.head_dim),
            "A LanguageModel supports no other head_dim.",
        )
    weights = _weights(folder / "model.safetensors", size)
    model = LanguageModel(size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval(), rope


def to_llama2c(
    model: LanguageModel, rope: ropewalk.Rope, file: Path, *, max_positions: int, force: bool = False
) -> None:
    """Write the file for llama2.c's `run.c`: "version 0" of its export.py, float32, little-endian.

    The file begins with seven int32: hidden size, intermediate size of the SwiGLU, number of layers, of heads and of
    key heads, vocabulary size (negative if the head is not the embedding), longest sequence. The weights follow:
    embedding, norms before attention, q, k, v, o, norms before the SwiGLU, gate, down, up, the last norm. A weight that
    every layer has is stored for all layers before the next one in this list. The weights are followed by cos and sin
    of every position, which the current run.c skips, and by the head if it is not the embedding. The rows of q and k
    are in the order of the pairing "interleaved".

    For a byte model (256 tokens), `tokenizer.bin` is written to the same folder, unless a file with the same content
    exists.

    Args:
        model: a model without absolute positions, with an eps of 1e-5, which is built into run.c.
        rope: must have base 10000 and no scaling, and rotate the whole head: run.c computes these angles itself.
        file: a new file. Its folder is created.
        max_positions: the longest sequence that run.c will generate, in tokens.
        force: whether to replace existing files.

    Raises:
        RopeError: run.c could not run the model (the message says why), a file exists, or it cannot be written.
    """
    size = model.size
    _check_exportable("to_llama2c", model, rope)
    _checks.integer("to_llama2c", "max_positions", max_positions, at_least=1, at_most=_LONGEST)
    if replace(rope, pairing="half") != ropewalk.Rope(size.head_dim, 10_000.0, "half"):
        raise _checks.error(
            "to_llama2c",
            "the rope must have base 10000, no scaling, and rotate the whole head, because run.c computes these angles",
            repr(rope),
            "Export it to Hugging Face instead.",
        )
    if size.norm_eps != 1e-5:
        raise _checks.error(
            "to_llama2c", "norm_eps must be 1e-05, as in run.c", repr(size.norm_eps), "Train with norm_eps=1e-5."
        )
    weights = dict(_reordered_weights(model, rope.pairing, "interleaved"))
    table = rope.at(torch.arange(max_positions))
    header = struct.pack(
        "<7i",
        size.hidden_size,
        size.intermediate_size,
        size.num_layers,
        size.num_heads,
        size.num_kv_heads,
        size.vocab_size if size.tied else -size.vocab_size,
        max_positions,
    )
    by_layer = (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj",
    )  # fmt: skip
    tensors = [
        weights["embed_tokens.weight"],
        *(weights[f"layers.{layer}.{name}.weight"] for name in by_layer for layer in range(size.num_layers)),
        weights["norm.weight"],
        table.cos,
        table.sin,
        *([] if size.tied else [weights[_HEAD]]),
    ]
    with ExitStack() as stack:  # both files are complete before either is renamed
        if size.vocab_size == _BYTES:
            _add_tokenizer(stack, file, force)
        new = stack.enter_context(files.new_file("to_llama2c", file, force=force))
        with new.open("wb") as out:
            out.write(header)
            for tensor in tensors:
                out.write(tensor.numpy().astype("<f4").tobytes())


def _add_tokenizer(stack: ExitStack, file: Path, force: bool) -> None:
    path, content = _tokenizer_path(file), tokenizer.llama2c()
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    if path.name == file.name:
        must = "the model file must not have the name of the tokenizer file in the same folder"
        raise _checks.error("to_llama2c", must, str(file), "Name it model.bin, for example.")
    stack.enter_context(files.new_file("to_llama2c", path, force=force)).write_bytes(content)


def _tokenizer_path(file: Path) -> Path:
    """Return the path of the tokenizer file that run.c reads, in the folder of the model."""
    return file.with_name("tokenizer.bin")


def run(file: Path, target: Path, form: str, *, max_positions: int, force: bool = False) -> None:
    """Export the model of a lab checkpoint in the format "hf" or "llama2.c".

    Arguments and errors are those of `to_hugging_face` and `to_llama2c`. The checkpoint itself is never replaced, even
    with `force`.
    """
    written = [target, *(target / name for name in _FOLDER)] if form == "hf" else [target, _tokenizer_path(target)]
    if any(path.exists() and path.samefile(file) for path in written):
        must = "the export must not replace its own checkpoint"
        raise _checks.error("export", must, f"{target} for {file}", "Pass another target.")
    model, rope, _ = checkpoint.load(file)
    if rope is None:
        fix = "Export a model that was trained with rotation."
        raise _checks.error("export", "the model must have a rope", f"a model without one in {file}", fix)
    to = {"hf": to_hugging_face, "llama2.c": to_llama2c}[form]
    to(model, rope, target, max_positions=max_positions, force=force)


def _check_exportable(who: str, model: LanguageModel, rope: ropewalk.Rope) -> None:
    if model.size.absolute is not None:
        raise _checks.error(who, "absolute must be None", repr(model.size.absolute), "A Llama has no such positions.")
    if not isinstance(rope, ropewalk.Rope) or rope.head_dim != model.size.head_dim:
        raise _checks.error(
            who, f"rope must be a Rope of head_dim={model.size.head_dim}", _checks.shown(rope), "Pass the model's own."
        )


def _as_base(rope: ropewalk.Rope) -> ropewalk.Rope:
    """Replace NTK by the larger base that gives the same rope, because a Llama config cannot express NTK."""
    base = None if rope.scaling is None else rope.scaling.as_base(rope.base, rope.rotary_dim)
    return rope if base is None else replace(rope, base=base, scaling=None)


def _reordered_weights(model: LanguageModel, before: str, after: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by name, with the rows of q_proj and k_proj reordered for another pairing."""
    for name, weight in model.state_dict().items():
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        yield name, _reorder_rows(weight, model.size.head_dim, before, after) if rotated else weight


def _reorder_rows(weight: Tensor, head_dim: int, before: str, after: str) -> Tensor:
    """Reorder the rows of `[heads · head_dim, width]` from one pairing to the other.

    In "half", each head has the first channels of all pairs, then the second ones. In "interleaved", pairs adjoin.
    """
    if before == after:
        return weight
    shape = (-1, 2, head_dim // 2) if before == "half" else (-1, head_dim // 2, 2)
    return weight.view(*shape, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _weights(file: Path, size: Size) -> dict[str, Tensor]:
    """Return the weights of a Llama of this size by the lab's names. All shapes are checked before a tensor is read."""
    expected, fix = shapes(size), "Use the model.safetensors that belongs to config.json."
    with files.open_safetensors(file) as (opened, _, kinds):
        # Old files contain inv_freq, and some contain the head although it is the embedding.
        stored = {name.removeprefix(_PREFIX): name for name in kinds if not name.endswith("rotary_emb.inv_freq")}
        if size.tied:
            stored.pop(_HEAD, None)
        if different := sorted(stored.keys() ^ expected.keys()):
            must = "model.safetensors must hold exactly the weights of this Llama"
            got = f"missing or unknown: {', '.join(different[:4])}"
            raise _checks.error("from_hugging_face", must, got, fix)
        for name, shape in expected.items():
            kind = kinds[stored[name]]
            if kind.shape != shape:
                must = f"{name} must have the shape {shape}"
                raise _checks.error("from_hugging_face", must, str(kind.shape), fix)
            if kind.dtype not in ("F64", "F32", "F16", "BF16"):
                must = f"{name} must have a floating-point dtype"
                raise _checks.error("from_hugging_face", must, kind.dtype, fix)
        return {name: files.read_tensor(opened, stored[name]) for name in expected}
