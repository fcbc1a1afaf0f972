"""Export a lab model to Hugging Face's Llama or to llama2.c's binary file, with its tokenizer.

A byte model has 256 tokens, and token n is byte n.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import ropewalk
from ropewalk import _checks
from ropewalk.tools import _files
from ropewalk.tools.lab import checkpoint
from ropewalk.tools.lab.model import EPS, LanguageModel

_HEAD = "lm_head.weight"
_BYTES = 256


def run(file: Path, target: Path, form: str, *, max_positions: int, force: bool = False) -> None:
    """Export the model of a checkpoint.

    Args:
        file: the checkpoint. It is never replaced.
        target: the folder for "hf", or the file for "llama2.c", which gets a `tokenizer.bin` beside it. Folders are
            created. Each file appears, or is replaced, only when it is complete.
        form: "hf" or "llama2.c".
        max_positions: the longest sequence that the other program will use, in tokens.
        force: whether to replace files whose content differs.

    Raises:
        RopeError: the other program could not run the model (the message says why), or a file exists.
        OSError: a file cannot be read or written.
    """
    target = target.resolve()
    model, rope, _ = checkpoint.load(file)
    if rope is None:
        fix = "Export a model that was trained with rotation."
        raise _checks.error("export", "the model must have a rope", f"a model without one in {file}", fix)
    if form == "hf":
        contents = {target / name: data for name, data in hugging_face(model, rope, max_positions).items()}
    else:
        contents = {target: llama2c(model, rope, max_positions)}
        if model.size.vocab_size == _BYTES:
            contents[target.with_name("tokenizer.bin")] = llama2c_tokenizer()
            if len(contents) == 1:
                must = "the model file must not have the name of the tokenizer file in the same folder"
                raise _checks.error("export", must, str(target), "Name it model.bin, for example.")
    existing = [path for path in contents if path.exists()]
    if any(path.samefile(own) for path in existing for own in (file, file.with_suffix(".json"))):
        must = "the export must not replace its own checkpoint"
        raise _checks.error("export", must, f"{target} for {file}", "Pass another target.")
    for path in existing:
        if not force and not (path.is_file() and path.read_bytes() == contents[path]):
            must, fix = f"{path} must not exist yet", "Pass another path, or replace it with --force."
            raise _checks.error("export", must, "a file or folder with other content", fix)
    with contextlib.ExitStack() as written:  # all files, before the first one takes its place
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            written.enter_context(_files.replaced(path)).write_bytes(data)


def hugging_face(model: LanguageModel, rope: ropewalk.Rope, max_positions: int) -> dict[str, bytes]:
    """Return the files for `LlamaForCausalLM.from_pretrained(folder)`, and the tokenizer of a byte model.

    Args:
        model: a model without absolute positions.
        rope: the rope of the model. With pairing "interleaved", the rows of q_proj and k_proj are reordered. NTK is
            written as a larger base, which gives the same rope. Dynamic NTK and other schemes are written unchanged.
        max_positions: `max_position_embeddings` of the config, in tokens: the length that the model is made for.

    Raises:
        RopeError: a Llama config cannot represent the rope.
    """
    size = model.size
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
        "max_position_embeddings": max_positions,
        "rms_norm_eps": EPS,
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
            "export",
            "a Llama config must be able to represent the rope",
            repr(rope),
            "A Llama config has no partial rotation, and dynamic NTK only if max_positions is its original length.",
        )
    weights = dict(_reordered_weights(model, rope.pairing, "half"))
    if size.tied:
        del weights[_HEAD]
    named = {name if name == _HEAD else f"model.{name}": weight for name, weight in weights.items()}
    texts = {"config.json": config} | (_tokenizer(max_positions) if size.vocab_size == _BYTES else {})
    return {
        "model.safetensors": safetensors.torch.save(named, {"format": "pt"}),
        **{name: (json.dumps(content, indent=2) + "\n").encode() for name, content in texts.items()},
    }


def llama2c(model: LanguageModel, rope: ropewalk.Rope, max_positions: int) -> bytes:
    """Return the file for llama2.c's `run.c`: "version 0" of its export.py, float32, little-endian.

    The file begins with seven int32: hidden size, intermediate size of the SwiGLU, number of layers, of heads and of
    key heads, vocabulary size (negative if the head is not the embedding), longest sequence. The weights follow:
    embedding, norms before attention, q, k, v, o, norms before the SwiGLU, gate, down, up, the last norm. A weight that
    every layer has is stored for all layers before the next one in this list. The weights are followed by cos and sin
    of every position, which the current run.c skips, and by the head if it is not the embedding. The rows of q and k
    are in the order of the pairing "interleaved".

    Args:
        model: a model without absolute positions.
        rope: must have base 10000 and no scaling, and rotate the whole head: run.c computes these angles itself.
        max_positions: the longest sequence that run.c will generate, in tokens.

    Raises:
        RopeError: the rope is another one.
    """
    size = model.size
    if replace(rope, pairing="half") != ropewalk.Rope(size.head_dim, 10_000.0, "half"):
        raise _checks.error(
            "export",
            "the rope must have base 10000, no scaling, and rotate the whole head, because run.c computes these angles",
            repr(rope),
            "Export it to Hugging Face instead.",
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
    return header + b"".join(tensor.numpy().astype("<f4").tobytes() for tensor in tensors)


def llama2c_tokenizer() -> bytes:
    """Return the tokenizer.bin of `run.c`: length of the longest piece, then score, length and bytes of each piece.

    Lengths are int32, in bytes, and scores are float32. Each byte is one piece, whose index is the value of the byte.
    No merges are possible. Byte 0, which would end a C string, is written as `<0x00>`.
    """
    pieces = [b"<0x00>", *(bytes([byte]) for byte in range(1, _BYTES))]
    longest = max(len(piece) for piece in pieces)
    return struct.pack("<i", longest) + b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)


def _tokenizer(max_positions: int) -> dict[str, dict[str, Any]]:
    """Return the JSON files for `AutoTokenizer.from_pretrained`: a byte-level BPE without merges or special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    # As in GPT-2, printable characters of Latin-1 stand for their own byte, and those from U+0100 on for the others.
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in own else next(others)) for byte in range(_BYTES)]
    model = {"type": "BPE", "vocab": {character: byte for byte, character in enumerate(characters)}, "merges": []}
    return {
        "tokenizer.json": {
            "version": "1.0",
            **nothing,
            "added_tokens": [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
        },
    }


def _as_base(rope: ropewalk.Rope) -> ropewalk.Rope:
    """Replace NTK by the larger base that gives the same rope, because a Llama config cannot express NTK."""
    base = None if rope.scaling is None else rope.scaling.as_base(rope.base, rope.rotary_dim)
    return rope if base is None else replace(rope, base=base, scaling=None)


def _reordered_weights(model: LanguageModel, before: str, after: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by name, with the rows of q_proj and k_proj reordered for another pairing.

    In "half", each head has the first channels of all pairs, then the second ones. In "interleaved", pairs adjoin.
    """
    pairs = model.size.head_dim // 2
    shape = (-1, 2, pairs) if before == "half" else (-1, pairs, 2)
    for name, weight in model.state_dict().items():
        if before != after and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = weight.view(*shape, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        yield name, weight
