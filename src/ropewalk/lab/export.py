"""A lab model as others keep it: a folder of Hugging Face's Llama, there and back, and llama2.c's binary file.

Nothing that exists is replaced without `force`, and what was there stays whole until the new files are.
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
from ropewalk.lab import checkpoint, files, tokenizer
from ropewalk.lab.model import LanguageModel, Size, shapes

_PREFIX = "model."
"""Hugging Face's LlamaForCausalLM has it before every name but that of the head."""
_HEAD = "lm_head.weight"

_BYTES = 256
"""Tokens of a model of bytes, which has a tokenizer."""

_FOLDER = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LONGEST = 2**24
"""Tokens: far more than any model of the lab reads, and no table of cos and sin fills the memory."""


def to_hugging_face(
    model: LanguageModel, rope: ropewalk.Rope, folder: Path, *, max_positions: int, force: bool = False
) -> None:
    """Write config.json and model.safetensors, which `LlamaForCausalLM.from_pretrained(folder)` reads.

    For a model of 256 tokens, which are bytes, tokenizer.json and tokenizer_config.json are written as well:
    `AutoTokenizer.from_pretrained(folder)` turns text into its UTF-8 bytes and back.

    Args:
        model: without absolute positions.
        rope: what turns its q and k; with pairing "interleaved", the rows of q and k are sorted anew. A scheme that
            depends on the length is written as it is, NTK as the larger base that it is.
        folder: new or empty. All files appear in it together.
        max_positions: `max_position_embeddings` of the config, in tokens: the length the model is for.
        force: replace a folder that holds nothing but files of these names.

    Raises:
        RopeError: a Llama of Hugging Face cannot be this model; the folder holds something; it cannot be written.
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
            "a config of Llama must be able to say the rope",
            repr(rope),
            "Partial rotation cannot be said there, and dynamic NTK only with max_positions as its own length.",
        )
    weights = dict(_paired(model, rope.pairing, "half"))
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
    """Read a Llama of Hugging Face: config.json and model.safetensors; the weights become float32.

    Returns:
        The model, and the rope of every layer: perhaps one whose length is to be said (`Rope.at_length`).

    Raises:
        RopeError: it has what a `LanguageModel` has not (biases, another activation), or a key or tensor is missing.
        FileNotFoundError: one of the two files is not there.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as e:
        must = f"{folder / 'config.json'} must be JSON"
        raise _checks.error("from_hugging_face", must, str(e), "Write the folder anew.") from e
    rope = ropewalk.from_config(config).rope
    same = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, wanted in same.items():
        if config.get(key, wanted) != wanted:
            raise _checks.error(
                "from_hugging_face", f"{key} must be {wanted!r}", repr(config[key]), "A LanguageModel has nothing else."
            )
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
            "A LanguageModel has no other heads.",
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
    """Write the file that llama2.c's `run.c` reads: "version 0" of its export.py, float32, little-endian.

    Seven int32: width, width inside the SwiGLU, layers, heads, key heads, vocabulary (negative where the head is not
    the embedding), longest sequence. Then the weights, kind by kind and each kind layer by layer: embedding, norms
    before attention, q, k, v, o, norms before the SwiGLU, gate, down, up, the last norm; cos and sin of every position
    (today's run.c skips them); the head. q and k are sorted for the pairing "interleaved". The tokens are not in it.
    For a model of 256 tokens, which are bytes, `tokenizer.bin` is written beside the file; one that is there already
    and has these contents stays.

    Args:
        model: without absolute positions; its eps must be 1e-5, which run.c has built in.
        rope: base 10000, no scaling, the whole head: run.c computes these angles itself.
        file: new; its folder is made.
        max_positions: the longest sequence run.c will make, in tokens.
        force: replace files that exist.

    Raises:
        RopeError: run.c could not run it (the message says why); a file is there already; it cannot be written.
    """
    size = model.size
    _check_exportable("to_llama2c", model, rope)
    _checks.integer("to_llama2c", "max_positions", max_positions, at_least=1, at_most=_LONGEST)
    if replace(rope, pairing="half") != ropewalk.Rope(size.head_dim, 10_000.0, "half"):
        raise _checks.error(
            "to_llama2c",
            "the rope must have base 10000, no scaling, and turn the whole head, since run.c computes these angles",
            repr(rope),
            "Export it to Hugging Face instead.",
        )
    if size.norm_eps != 1e-5:
        raise _checks.error(
            "to_llama2c", "norm_eps must be 1e-05, which run.c has built in", repr(size.norm_eps), "Train with it."
        )
    weights = dict(_paired(model, rope.pairing, "interleaved"))
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
    with ExitStack() as both:  # neither takes its place before both are written
        if size.vocab_size == _BYTES:
            _add_tokenizer(both, file, force)
        new = both.enter_context(files.new_file("to_llama2c", file, force=force))
        with new.open("wb") as out:
            out.write(header)
            for tensor in tensors:
                out.write(tensor.numpy().astype("<f4").tobytes())


def _add_tokenizer(both: ExitStack, file: Path, force: bool) -> None:
    beside, content = _tokenizer_beside(file), tokenizer.llama2c()
    if beside.is_file() and beside.stat().st_size == len(content) and beside.read_bytes() == content:
        return
    if beside.name == file.name:
        must = "the model must have another name than the tokenizer that is written beside it"
        raise _checks.error("to_llama2c", must, str(file), "Name it model.bin, for example.")
    both.enter_context(files.new_file("to_llama2c", beside, force=force)).write_bytes(content)


def _tokenizer_beside(file: Path) -> Path:
    """The name by which run.c looks for it, in the folder of the model."""
    return file.with_name("tokenizer.bin")


def run(file: Path, target: Path, form: str, *, max_positions: int, force: bool = False) -> None:
    """Write the model of a checkpoint of the lab in the form "hf" or "llama2.c"; errors as above.

    The checkpoint itself is never replaced, whatever `force` says.
    """
    touched = [target, *(target / name for name in _FOLDER)] if form == "hf" else [target, _tokenizer_beside(target)]
    if any(path.exists() and path.samefile(file) for path in touched):
        must = "the export must not take the place of its own checkpoint"
        raise _checks.error("export", must, f"{target} for {file}", "Name another target.")
    model, rope, _ = checkpoint.load(file)
    if rope is None:
        raise _checks.error("export", "the model must have a rope", f"one without in {file}", "A Llama has one.")
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
    """A scheme that is a larger base (NTK) as that: a config of Llama cannot say it otherwise."""
    base = None if rope.scaling is None else rope.scaling.as_base(rope.base, rope.rotary_dim)
    return rope if base is None else replace(rope, base=base, scaling=None)


def _paired(model: LanguageModel, before: str, after: str) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name; the rows of q and k in the order of another pairing."""
    for name, weight in model.state_dict().items():
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        yield name, _sorted_rows(weight, model.size.head_dim, before, after) if rotated else weight


def _sorted_rows(weight: Tensor, head_dim: int, before: str, after: str) -> Tensor:
    """[heads · head_dim, width]: "half" has the first channels of all pairs, then the second; the other, by pairs."""
    if before == after:
        return weight
    shape = (-1, 2, head_dim // 2) if before == "half" else (-1, head_dim // 2, 2)
    return weight.view(*shape, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _weights(file: Path, size: Size) -> dict[str, Tensor]:
    """The weights of a Llama of that size, under our names; none is read before all have the right shape."""
    wanted, cure = shapes(size), "Is it the file that belongs to config.json?"
    with files.reading(file) as (opened, _, kinds):
        # Old files hold what can be computed, and some the head that is the embedding.
        given = {name.removeprefix(_PREFIX): name for name in kinds if not name.endswith("rotary_emb.inv_freq")}
        if size.tied:
            given.pop(_HEAD, None)
        if different := sorted(given.keys() ^ wanted.keys()):
            must = "model.safetensors must hold exactly the weights of this Llama"
            came = f"missing or unknown: {', '.join(different[:4])}"
            raise _checks.error("from_hugging_face", must, came, cure)
        for name, shape in wanted.items():
            kind = kinds[given[name]]
            if kind.shape != shape:
                must = f"{name} must have the shape {shape}"
                raise _checks.error("from_hugging_face", must, str(kind.shape), cure)
            if kind.dtype not in ("F64", "F32", "F16", "BF16"):
                must = f"{name} must be of floating point"
                raise _checks.error("from_hugging_face", must, kind.dtype, cure)
        return {name: files.tensor(opened, given[name]) for name in wanted}
