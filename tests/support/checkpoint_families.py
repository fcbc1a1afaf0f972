"""Run models of transformers with converted weights, by replacing their rotation with one in the other pairing."""

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


def channels_in_other_pairing(rotary_dim: int, source: str) -> list[int]:
    """Return for each channel in the pairing `source` its index in the other pairing."""
    half = rotary_dim // 2
    if source == "half":  # channels i and i + half are a pair, and become channels 2i and 2i + 1
        return [2 * i for i in range(half)] + [2 * i + 1 for i in range(half)]
    return [i // 2 + (i % 2) * half for i in range(rotary_dim)]


def save(name: str, folder: Path, **changes: Any) -> nn.Module:
    """Save a small model with random weights, also in norms and biases, and return it."""
    model = tiny_models.build(name, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def load(like: nn.Module, folder: Path) -> nn.Module:
    """Load a model of the same class from a folder, which must hold exactly its weights."""
    model, info = type(like).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of a model for 12 tokens, or its last hidden state if it has no logits."""
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        result = model(input_ids=tokens)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


@contextlib.contextmanager
def other_rotation(model: nn.Module, source: str, head_dim: int, rotary_dim: int, offset: int) -> Iterator[None]:
    """Replace the rotation of a model by one whose q and k have the other pairing, before and after it.

    Args:
        model: a model whose code rotates in the pairing `source`.
        source: "half" or "interleaved".
        head_dim, rotary_dim, offset: the channels of a head, those that rotate, and those before the rotated ones.
    """
    module = sys.modules[type(model).__module__]
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n.startswith("apply_rotary")}
    assert functions
    other_channels = channels_in_other_pairing(rotary_dim, source)
    called = []

    def reorder(x: torch.Tensor, by: list[int]) -> torch.Tensor:
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
                    bound.arguments[name] = reorder(value, other_channels)
            result = function(*bound.args, **bound.kwargs)
            inverse = [other_channels.index(c) for c in range(rotary_dim)]
            if isinstance(result, torch.Tensor):
                return reorder(result, inverse)
            return tuple(reorder(x, inverse) for x in result)

        return rotate

    for name, function in functions.items():
        setattr(module, name, replacement(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)
    assert called
