"""Write a small Llama to a folder, and run `ropewalk convert` on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ropewalk.tools.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the random weights of a small Llama by name."""
    shapes = {"model.embed_tokens.weight": (16, 32), "model.norm.weight": (32,), "lm_head.weight": (16, 32)}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (32, 32),
            f"{attention}.k_proj.weight": (16, 32),
            f"{attention}.v_proj.weight": (16, 32),
            f"{attention}.o_proj.weight": (32, 32),
            f"{mlp}.gate_proj.weight": (48, 32),
            f"{mlp}.up_proj.weight": (48, 32),
            f"{mlp}.down_proj.weight": (32, 48),
            f"model.layers.{layer}.input_layernorm.weight": (32,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (32,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_model(folder: Path, *, shards: int = 1, config: dict[str, Any] = CONFIG, **replaced: Any) -> Path:
    """Write a model in Hugging Face's format. `replaced` are tensors by name, with "__" for "."; None removes one."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights()
    for name, tensor in replaced.items():
        tensors[name.replace("__", ".")] = tensor
    named = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    if shards == 1:
        save_file(dict(named), folder / "model.safetensors", {"format": "pt"})
        return folder
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(dict(named[i::shards]), folder / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(dict(named[i::shards]), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


PARAMS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 10000.0}


def meta_weights() -> dict[str, torch.Tensor]:
    """Return the random weights of the same Llama by Meta's names."""
    return by_metas_names(weights())


def by_metas_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama by Meta's names."""
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.": "",
        "self_attn.": "attention.", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def write_meta(folder: Path, tensors: object, **params: Any) -> Path:
    """Write a model in Meta's format: what torch.save writes for `tensors`, and a params.json."""
    folder.mkdir()
    torch.save(tensors, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    return folder


def run(*arguments: object, status: int = 0) -> str:
    """What `ropewalk convert` says."""
    ran = CliRunner().invoke(main, ["convert", *map(str, arguments)])
    assert ran.exit_code == status, ran.output
    return ran.output


def refused(match: str, *arguments: object, target: Path) -> None:
    """It says why, in one line, and writes nothing."""
    before = sorted(target.parent.iterdir())
    output = run(*arguments, status=1)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    assert match in output
    assert sorted(target.parent.iterdir()) == before
