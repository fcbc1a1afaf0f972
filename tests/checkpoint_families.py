"""Models of transformers in the other pairing: their weights converted, and their rotation made to fit."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiny_models

_ROTATED = ("q", "k", "x", "xq", "xk", "tensor", "query", "key", "query_states", "key_states")


def places(rotary_dim: int, source: str) -> list[int]:
    """For each channel of the pairing `source`, the channel of the other pairing in which it is found."""
    half = rotary_dim // 2
    if source == "half":  # channel i and channel i + half are a pair; there they are 2i and 2i + 1
        return [2 * i for i in range(half)] + [2 * i + 1 for i in range(half)]
    return [i // 2 + (i % 2) * half for i in range(rotary_dim)]


def save(name: str, folder: Path, **changes: Any) -> nn.Module:
    """A small model with random weights in a folder. No two weights are alike, also those of norms and biases."""
    model = tiny_models.build(name, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def load(like: nn.Module, folder: Path) -> nn.Module:
    """A model from a folder; nothing is missing there, and nothing too much."""
    model, said = type(like).from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"], said
    assert not said["unexpected_keys"], said
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    """What a model makes of 12 tokens."""
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        made = model(input_ids=tokens)
    return made.logits if hasattr(made, "logits") else made.last_hidden_state


@contextlib.contextmanager
def other_rotation(model: nn.Module, source: str, head_dim: int, rotary_dim: int, offset: int) -> Iterator[None]:
    """The model's own rotation, given channels in the other pairing and giving them so.

    Args:
        model: whose code rotates in the pairing `source`.
        head_dim, rotary_dim, offset: how many channels a head has, how many rotate, and how many stand before those.
    """
    module = sys.modules[type(model).__module__]
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n.startswith("apply_rotary")}
    assert functions
    there = places(rotary_dim, source)
    called = []

    def reordered(x: torch.Tensor, by: list[int]) -> torch.Tensor:
        if x.shape[-1] == rotary_dim:
            return x[..., by]
        assert x.shape[-1] == head_dim
        whole = [*range(offset), *(offset + c for c in by), *range(offset + rotary_dim, head_dim)]
        return x[..., whole]

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def rotate(*args: Any, **kwargs: Any) -> Any:
            called.append(function)
            bound = signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in _ROTATED:
                    bound.arguments[name] = reordered(value, there)
            made = function(*bound.args, **bound.kwargs)
            back = [there.index(c) for c in range(rotary_dim)]
            if isinstance(made, torch.Tensor):
                return reordered(made, back)
            return tuple(reordered(x, back) for x in made)

        return rotate

    for name, function in functions.items():
        setattr(module, name, replacement(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)
    assert called
