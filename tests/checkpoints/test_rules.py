"""Compare conversions with the permutations of other projects, and of Meta's files with Meta's definition of Llama.

The permutations are written anew, row by row. Each names the function of the other project.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from checkpoint_families import load, logits, save
from checkpoint_files import by_metas_names
from ropewalk import formats
from ropewalk.tools import convert as checkpoints

pytest.importorskip("transformers", "5.23")

HEADS = {"q": 4, "k": 2}
LLAMA3 = tiny_models.MODELS["llama:llama3"]


def convert(source: Path, target: Path, to: Any, **about: Any) -> None:
    checkpoints.write(checkpoints.plan(checkpoints.read(source, **about), to), target, lambda *_: None)


def transformers_permute(old: Tensor, heads: int) -> Tensor:
    """Permute as `permute` in convert_llama_weights_to_hf.py of transformers: even rows of a head, then odd ones."""
    size, new = len(old) // heads, torch.empty_like(old)
    for head in range(heads):
        for i in range(size // 2):
            new[head * size + i] = old[head * size + 2 * i]
            new[head * size + size // 2 + i] = old[head * size + 2 * i + 1]
    return new


def torchtune_permute(old: Tensor, heads: int) -> Tensor:
    """Permute as `hf_to_tune` in models/convert_weights.py of torchtune 0.6.1.

    For each i, row i of the first half of a head is followed by row i of the second.
    """
    new, size = [], len(old) // heads
    for head in range(heads):
        first, second = old[head * size :][: size // 2], old[head * size :][size // 2 : size]
        for pair in zip(first, second, strict=True):
            new += pair
    return torch.stack(new)


def llama_cpp_permute(old: Tensor, heads: int) -> Tensor:
    """Permute as `LlamaModel.permute` in convert_hf_to_gguf.py of llama.cpp: swap the axes of halves and rows."""
    pairs = len(old) // heads // 2
    where = [(head, half, i) for head in range(heads) for i in range(pairs) for half in range(2)]
    return torch.stack([old[(head * 2 + half) * pairs + i] for head, half, i in where])


@pytest.mark.parametrize(
    ("to", "rule"),
    [("half", transformers_permute), ("interleaved", torchtune_permute), ("interleaved", llama_cpp_permute)],
)
def test_permutations_of_other_projects(to: str, rule: Callable[[Tensor, int], Tensor], tmp_path: Path) -> None:
    name = "llama" if to == "interleaved" else "cohere"
    model = save(name, tmp_path / "a", attention_bias=True)
    convert(tmp_path / "a", tmp_path / "b", to)
    written = load(model, tmp_path / "b").state_dict()
    moved = 0
    for key, old in model.state_dict().items():
        role = next((role for role in HEADS if f"{role}_proj." in key), None)
        assert torch.equal(written[key], old if role is None else rule(old, HEADS[role])), key
        if role is not None:
            moved += 1
            assert torch.equal(formats.permute(old, len(old) // HEADS[role], to=to), rule(old, HEADS[role])), key
    assert moved == 8


def meta_logits(params: dict[str, Any], weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return the float32 logits of Llama as Meta's model.py defines it, with pairs of channels as complex numbers."""
    heads, keys, dim = params["n_heads"], params["n_kv_heads"], params["dim"]
    size = dim // heads
    inv_freq = params["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if params.get("use_scaled_rope"):
        waves, factor = 2 * torch.pi / inv_freq, params["rope_scaling_factor"]
        share = (8192 / waves - 1.0) / (4.0 - 1.0)
        between = (1 - share) * inv_freq / factor + share * inv_freq
        inv_freq = torch.where(waves > 8192, inv_freq / factor, torch.where(waves < 2048, inv_freq, between))
    angles = torch.outer(torch.arange(len(tokens), dtype=torch.float64), inv_freq)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + params["norm_eps"]) * weight

    def rotated(x: Tensor, count: int) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(len(tokens), count, size // 2, 2))
        return torch.view_as_real(pairs * turn).reshape(len(tokens), count, size)

    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        w = {key.removeprefix(f"layers.{layer}."): value for key, value in weights.items()}
        inner = norm(x, w["attention_norm.weight"])
        q = rotated(inner @ w["attention.wq.weight"].T, heads)
        k = rotated(inner @ w["attention.wk.weight"].T, keys).repeat_interleave(heads // keys, 1)
        v = (inner @ w["attention.wv.weight"].T).reshape(-1, keys, size).repeat_interleave(heads // keys, 1)
        scores = torch.einsum("qhc,khc->hqk", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khc->qhc", scores, v).reshape(len(tokens), dim) @ w["attention.wo.weight"].T
        inner = norm(x, w["ffn_norm.weight"])
        gate = torch.nn.functional.silu(inner @ w["feed_forward.w1.weight"].T)
        x = x + (gate * (inner @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["output.weight"].T


TOKENS = list(range(3, 15))


def in_metas_format(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a Llama of transformers as Meta's files hold them, and what params.json states."""
    config, weights = model.config, dict(model.state_dict())
    for role, heads in HEADS.items():
        names = [name for name in weights if f"{role}_proj." in name]
        weights |= {name: llama_cpp_permute(weights[name], heads) for name in names}
    scaled = config.rope_parameters["rope_type"] == "llama3"
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        **({"use_scaled_rope": True} if scaled else {}),
    }
    return by_metas_names(weights), params


def cut(weights: dict[str, Tensor], count: int, *, embedding: int) -> list[dict[str, Tensor]]:
    """Split the weights into `count` pieces, as Meta splits larger models."""
    axes = dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), 0) | {"wo": 1, "w2": 1, "tok_embeddings": embedding}
    pieces: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, weight in weights.items():
        axis = axes.get(name.split(".")[-2])
        parts = [weight] * count if axis is None else weight.chunk(count, axis)
        for piece, part in zip(pieces, parts, strict=True):
            piece[name] = part.clone()
    return pieces


@pytest.mark.parametrize(("count", "embedding"), [(1, 0), (2, 0), (2, 1)])
def test_meta_to_llama(count: int, embedding: int, tmp_path: Path) -> None:
    changes = LLAMA3 if embedding == 0 else {}
    model = save("llama", tmp_path / "hf", **changes)
    weights, params = in_metas_format(model)
    factor = model.config.rope_parameters.get("factor")  # not in Llama 3.1's files
    (tmp_path / "meta").mkdir()
    for number, piece in enumerate(cut(weights, count, embedding=embedding)):
        piece["rope.freqs"] = torch.ones(8)  # in Llama 2's files
        torch.save(piece, tmp_path / "meta" / f"consolidated.{number:02}.pth")
    (tmp_path / "meta" / "params.json").write_text(json.dumps(params))
    convert(tmp_path / "meta", tmp_path / "back", "half", factor=factor, max_positions=131_072)
    made = load(model, tmp_path / "back")
    for key, weight in model.state_dict().items():
        assert torch.equal(made.state_dict()[key], weight), key
    expected = meta_logits({**params, "rope_scaling_factor": factor}, weights, TOKENS)[None]
    torch.testing.assert_close(logits(made), expected, atol=2e-5, rtol=2e-5)
