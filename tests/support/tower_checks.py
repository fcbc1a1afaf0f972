"""Measure a vision tower before and after `accelerate`, and state the angles that its tables must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import oracle
import tiny_towers
from model_checks import relative, worst_gradient
from ropewalk.integrations.transformers import accelerate, restore

HALVES, TURNS = (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)
TWICE = (0, 1, 2, 3) * 2
# The axis of each pair and its place in a progression, from the papers and the modeling files: of head size 16, and
# how many pairs the progression has.
PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "inkling2_vision": (HALVES[::-1], TWICE, 4),
    "kimi_k25_vision": (TURNS[::-1], (0, 0, 1, 1, 2, 2, 3, 3), 4),
    "minimax_m3_vl_vision": ((0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2) * 3, 3),
    "pixtral": (HALVES, (0, 2, 4, 6, 1, 3, 5, 7), 8),
    "step3p5_vision": (HALVES[::-1], TWICE, 4),
}
BASES = {"dinov3_vit": 100.0, "eomt_dinov3": 100.0, "gemma4_vision": 100.0, "lfm3_vl_vision": 1e6, "sapiens2": 100.0}


def exact_tables(name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin `[tokens, pairs]` of integer positions `[axes, tokens]` with oracle.py in float64."""
    axis, place, length = PAIRS.get(name, (HALVES, TWICE, 4))
    inv_freq = [float(w) for w in oracle.inv_freq(BASES.get(name, 10_000.0), 2 * length)]
    pairs = [
        oracle.cos_sin(positions[a].tolist(), inv_freq[i : i + 1]) for a, i in zip(axis, place, strict=True)
    ]  # each [tokens, 1]
    cos, sin = (torch.from_numpy(np.concatenate([pair[n] for pair in pairs], axis=1)) for n in (0, 1))
    return cos, sin


def rotary(model: nn.Module) -> list[nn.Module]:
    """Return the tower's own rotary modules."""
    return [module for module in model.modules() if {"inv_freq", "freqs_ci"} & set(module._buffers)]


def unrotated(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return the output of the tower with all angles set to 0."""
    kept = []
    for module in rotary(model):
        for name in ("inv_freq", "freqs_ci"):
            if (buffer := module._buffers.get(name)) is not None:
                kept.append((buffer, buffer.clone()))
                buffer.fill_(0.0 if name == "inv_freq" else 1.0)
    made = tiny_towers.output(model, given)
    for buffer, values in kept:
        buffer.copy_(values)
    return made


def gradients(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    made = tiny_towers.output(model, given)
    (made * torch.sin(torch.arange(made.numel(), dtype=torch.float32)).reshape(made.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Row:
    """The measurements of one tower of the table, in float32 and with random weights: the worst of its calls."""

    name: str
    function: str
    ropes: tuple[str, ...]
    given: int  # how many calls: images of several sizes, several packed, video
    seen: float  # relative change of the outputs without rotation
    near: float  # relative difference of the outputs to transformers
    theirs_equal: bool | None  # angles="theirs" to transformers: every bit; None if its function cannot be replaced
    gradient: float  # worst_gradient, to transformers
    undone: bool  # after restore: every bit


def measure(name: str) -> Row:
    model, calls = tiny_towers.build(name), tiny_towers.calls(name)

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            return [tiny_towers.output(model, given) for given in calls]

    wanted, wanted_gradients = outputs(), gradients(model, calls[-1])
    with torch.no_grad():
        seen = relative(unrotated(model, calls[0]), wanted[0])
    said = accelerate(model)
    near = max(relative(ours, theirs) for ours, theirs in zip(outputs(), wanted, strict=True))
    gradient = worst_gradient(gradients(model, calls[-1]), wanted_gradients)
    restore(model)
    theirs_equal = None
    if said.functions:
        accelerate(model, angles="theirs")
        theirs_equal = all(map(torch.equal, outputs(), wanted))
        restore(model)
    return Row(
        name,
        ", ".join(sorted({function.rpartition(".")[2] for function in said.functions})),
        tuple(dict.fromkeys(map(str, said.ropes.values()))),
        len(calls),
        seen,
        near,
        theirs_equal,
        gradient,
        all(map(torch.equal, outputs(), wanted)),
    )
