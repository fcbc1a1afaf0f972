"""Measure a model before and after `accelerate`, and compare it with its own function given exact tables.

The exact tables are computed from the model's rope parameters by oracle.py: float64 cos and sin of position · frequency
in 60 digits, rounded once to float32. They do not depend on ropewalk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
import tiny_models
from ropewalk import RopeError, Rotation
from ropewalk.integrations.transformers import accelerate, restore
from ropewalk.integrations.transformers.functions import attached_to

FAR = 99_936  # a position at which float32 tables have drifted
NEAR = 2.0**-14
"""The largest relative difference of outputs at positions up to 63, a derived bound; of gradients, twice that.

A sum of n float32 products, whose order depends on the processor, is within n · 2⁻²⁴ of their size, and an output of
these models is the end of about 2¹⁰ products and sums. The angles of float32 add at most 64 · 2⁻²² (power, reciprocal
and product). An output without the right rotation differs by more than 1e-3."""


@cache
def cos_sin(positions: tuple[int, ...], frequencies: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    return oracle.cos_sin(positions, frequencies)


def frequencies(parameters: dict[str, Any], pairs: int, config: Any) -> list[Any]:
    """Compute the frequencies of a config's rope parameters by the formulas of the papers."""
    kind, base, dim = parameters["rope_type"], parameters["rope_theta"], 2 * pairs
    trained = parameters.get("original_max_position_embeddings")
    if kind == "default":
        return oracle.inv_freq(base, dim)
    if kind == "linear":
        return oracle.linear(base, dim, parameters["factor"])
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return oracle.by_parts(base, dim, parameters["factor"], low, high, trained)
    if kind == "yarn":
        fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
        truncate = parameters.get("truncate", True)
        return oracle.yarn(base, dim, parameters["factor"], trained, fast, slow, truncate)
    if kind == "longrope":
        return [w / f for w, f in zip(oracle.inv_freq(base, dim), parameters["long_factor"], strict=True)]
    if kind == "proportional":
        return oracle.proportional(base, dim, parameters.get("partial_rotary_factor", 1.0))
    raise NotImplementedError(kind)


class ExactTables(nn.Module):
    """Replaces a rotary module: returns exact cos and sin in the format of the model, which keeps its function."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "original" else getattr(super().__getattr__("original"), name)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        original, prefix = self._modules["original"], f"{layer_type}_" if layer_type else ""
        parameters = original.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        pairs = getattr(original, f"{prefix}inv_freq").numel()
        factor = getattr(original, f"{prefix}attention_scaling", 1.0)
        exact = tuple(float(w) for w in frequencies(parameters, pairs, original.config))
        cos, sin = (
            torch.from_numpy(factor * table).float().reshape(*position_ids.shape, -1)
            for table in cos_sin(tuple(position_ids.flatten().tolist()), exact)
        )
        theirs = original(x, position_ids, **({"layer_type": layer_type} if layer_type else {}))
        if isinstance(theirs, Tensor):
            return torch.complex(cos, sin)
        if theirs[0].shape[-1] == 2 * pairs:
            twice = torch.equal(theirs[0][..., ::2], theirs[0][..., 1::2])
            cos, sin = (t.repeat_interleave(2, -1) if twice else torch.cat((t, t), -1) for t in (cos, sin))
        return cos, sin


def with_exact_tables(model: nn.Module) -> None:
    """Run the model with its own function and exact tables."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if "RotaryEmbedding" in type(child).__name__:
                module._modules[name] = ExactTables(child)


def attached(tables: Any) -> Rotation:
    """Return the Rotation that is attached to the tables of an accelerated model."""
    given = {"freqs_cis": tables} if isinstance(tables, Tensor) else {"cos": tables[0], "sin": tables[1]}
    found = attached_to(given)
    assert found is not None
    return found.rotation


def refused(model: Any, message: str, **options: Any) -> None:
    """Check that `accelerate` raises, and that the model does not change."""
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    with pytest.raises(RopeError, match=message):
        accelerate(model, **options)
    assert {name: (id(module), type(module)) for name, module in model.named_modules()} == before


def tokens(batch: int = 2, seq: int = 64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(3, 100, (batch, seq)))


def output(model: nn.Module, ids: Tensor, start: int = 0) -> Tensor:
    """Return the logits, or the last hidden states of a model without a head, at positions from `start` on."""
    return model(input_ids=ids, position_ids=torch.arange(start, start + ids.shape[1])[None])[0]


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    result = output(model, ids)
    weights = torch.sin(torch.arange(result.numel(), dtype=torch.float32)).reshape(result.shape)
    (result * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_gradient(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a parameter's gradient, divided by its norm or by 1 % of the largest norm.

    Without that lower bound, parameters whose gradient is a sum that cancels (a single factor of an activation) would
    dominate. There, float32 gradients of transformers differ from its own in float64 by as much.
    """
    floor = 0.01 * max(float(grad.norm()) for grad in expected.values())
    return max(float((got[name] - grad).norm()) / max(floor, float(grad.norm())) for name, grad in expected.items())


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest element."""
    return float((got - expected).abs().max() / expected.abs().max())


def rms(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Row:
    """The measurements of one model of the table, in float32 and with random weights."""

    name: str
    function: str
    ropes: tuple[str, ...]
    seen: float  # relative change of the outputs where every position is doubled: the rotation counts
    near: float  # relative difference of the logits to transformers, positions 0 to 63
    drift: float  # of transformers to its own function with exact tables, positions 99,936 to 99,999
    far_equal: bool  # ropewalk to that function with exact tables: every bit
    theirs_equal: bool  # angles="theirs" to transformers there: every bit
    gradient: float  # worst_gradient, to transformers
    greedy: bool | None  # the same 12 tokens; None for a model that does not generate
    undone: bool  # after restore: every bit


def measure(name: str) -> Row:
    model, ids, length = tiny_models.build(name), tokens(), tiny_models.LENGTH.get(name)
    exact = tiny_models.build(name)
    with_exact_tables(exact)
    reference = model if length is None else exact  # LongRoPE: theirs takes the short frequencies for short sequences
    with torch.no_grad():
        near, far = output(reference, ids), output(model, ids, FAR)
        wanted = output(exact, ids, FAR)
        doubled = reference(input_ids=ids, position_ids=2 * torch.arange(ids.shape[1])[None])[0]
    grads, greedy = gradients(reference, ids[:, :16]), generated(reference, ids[:1, :16])
    said = accelerate(model, length=length)
    with torch.no_grad():
        ours_near, ours_far = output(model, ids), output(model, ids, FAR)
    ours = gradients(model, ids[:, :16])
    ours_greedy = generated(model, ids[:1, :16])
    restore(model)
    accelerate(model, angles="theirs")
    with torch.no_grad():
        theirs = output(model, ids, FAR)
    restore(model)
    with torch.no_grad():
        again = output(model, ids, FAR)
    return Row(
        name,
        ", ".join(sorted({function.rpartition(".")[2] for function in said.functions})),
        tuple(dict.fromkeys(map(str, said.ropes.values()))),
        relative(doubled, near),
        relative(ours_near, near),
        relative(far, wanted),
        torch.equal(ours_far, wanted),
        torch.equal(theirs, far),
        worst_gradient(ours, grads),
        None if greedy is None else bool(torch.equal(ours_greedy, greedy)),
        torch.equal(again, far),
    )


def generated(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Generate 12 tokens greedily. Return None if the model does not generate."""
    if not model.can_generate():
        return None
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=-1)
