"""Greedy generation by whole models gives the same tokens with every cache, without a cache, and in transformers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import KVCache, Rope, from_config

NEW = 12


CACHES: dict[str, Callable[..., Any]] = {
    "capacity": lambda layers, heads, dim: KVCache(layers, 1, heads, dim, capacity=40, dtype=torch.float64),
    "much capacity": lambda layers, heads, dim: KVCache(layers, 1, heads, dim, capacity=4000, dtype=torch.float64),
    "window": lambda layers, heads, dim: KVCache(layers, 1, heads, dim, window=30, dtype=torch.float64),
    "sinks": lambda layers, heads, dim: KVCache(layers, 1, heads, dim, window=26, sinks=4, dtype=torch.float64),
}


def benchmark(name: str) -> Any:
    """Import a script of benchmarks/, with which the speed of the same model is measured."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


Logits = Callable[[Tensor, Any, Any], Tensor]
"""tokens `[1, seq]`, a rotation and a step or None → the logits of the last token `[1, vocabulary]`."""


def without_a_cache(logits: Logits, rope: Rope, prompt: Tensor) -> list[int]:
    tokens = prompt
    for _ in range(NEW):
        rotation = rope.at(torch.arange(tokens.shape[1])[None], dtype=torch.float64)
        tokens = torch.cat([tokens, logits(tokens, rotation, None).argmax(-1)[None]], dim=1)
    return tokens[0, prompt.shape[1] :].tolist()


def generate_with(cache: Any, logits: Logits, rope: Rope, prompt: Tensor) -> list[int]:
    """Generate with a cache: the prompt in two steps, then token by token."""
    made: list[int] = []
    pieces = [prompt[:, :4], prompt[:, 4:]]
    while len(made) < NEW:
        for piece in pieces:
            step = cache.step(piece.shape[1])
            last = logits(piece, step.rotation(rope, dtype=torch.float64), step)
        made.append(int(last.argmax()))
        pieces = [torch.tensor([made[-1:]])]
    return made


@pytest.mark.parametrize("kind", CACHES)
def test_a_checkpoint_of_transformers(kind: str) -> None:
    decode = benchmark("decode")
    size = decode.Geometry(hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, layers=2, vocabulary=50)
    model, theirs = decode.build_models(size, torch.float64)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():  # shared with the weights of transformers
        torch.nn.init.normal_(parameter, std=0.2 if "embed" in name else 0.8)
    rope, prompt = from_config(theirs.config.to_dict()).rope, torch.randint(50, (1, 9))
    assert rope is not None

    def logits(tokens: Tensor, rotation: Any, step: Any) -> Tensor:
        return model(tokens, rotation, cache=step)[:, -1]

    with torch.no_grad():
        wanted = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        assert len(set(wanted[0, 9:].tolist())) > 4
        assert generate_with(CACHES[kind](2, 2, 16), logits, rope, prompt) == wanted[0, 9:].tolist()
        assert without_a_cache(logits, rope, prompt) == wanted[0, 9:].tolist()
