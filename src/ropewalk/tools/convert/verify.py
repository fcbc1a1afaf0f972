"""Verify a conversion: the source and the result, each rotated with its own pairing, must give the same scores.

The plan says which rows belong to which head. This module reads the written files and checks that these rows are in the
right order, and that no other byte has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ropewalk import _checks
from ropewalk.rope.rope import Pairing, Rope
from ropewalk.rotation.api import Rotation
from ropewalk.tools.convert import shards
from ropewalk.tools.convert.layouts import Part
from ropewalk.tools.convert.plan import Plan
from ropewalk.tools.convert.raw import Bytes, Tensor, as_column, chunks

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_TOKENS = 8
_FARTHEST = 2**17
_TOLERANCE = 1e-9
"""The tolerance, relative to the largest score. Both checkpoints sum the same float64 products in another order, which
causes differences of about 1e-13 in the widest model."""


def verify(plan: Plan, written: Path, say: Callable[[str], None]) -> None:
    """Compare the scores of q and k before and after the conversion, for random input at random positions.

    Every head of every layer that rotates is compared.

    Args:
        plan: the conversion.
        written: the folder of the result.
        say: a function that is called with one line of text for each layer.

    Raises:
        RopeError: the scores differ, a row that is not rotated has changed, or a tensor is missing.
    """
    after = _written_tensors(plan, written)
    before = plan.source.tensors
    if before.keys() - after.keys():
        _refuse(min(before.keys() - after.keys()), "no such tensor")
    for name, tensor in before.items():
        _check_unrotated_rows(name, tensor, after[name], plan.parts.get(name, []))
    generator = torch.Generator().manual_seed(0)
    layers: dict[int, dict[str, list[tuple[str, Part]]]] = {}
    for name, parts in plan.parts.items():
        for part in parts:
            layers.setdefault(part.layer, {"q": [], "k": []})[part.role].append((name, part))
    ropes = plan.source.ropes.layers
    for layer, roles in sorted(layers.items()):
        rope = ropes[min(layer, len(ropes) - 1)]
        if rope is not None:
            worst = _compare_layer(plan, layer, roles, rope, before, after, generator)
            say(f"layer {layer}: scores agree, with differences of at most {worst:.1e} of the largest")


def _written_tensors(plan: Plan, folder: Path) -> dict[str, Tensor]:
    """Read the headers of the written files. Return each tensor by its name."""
    return {name: tensor for file in plan.files for name, tensor in shards.header(folder / file)[0].items()}


def _check_unrotated_rows(name: str, before: Tensor, after: Tensor, parts: list[Part]) -> None:
    """Raise a RopeError if a row that is not rotated has changed."""
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        _refuse(name, f"{after.dtype} of shape {after.shape} instead of {before.dtype} of shape {before.shape}")
    if parts and all(part.kind == "norm" for part in parts):
        before, after = as_column(before), as_column(after)
    moved = np.zeros(before.rows, bool)
    for part in parts:
        for start in part.starts:
            moved[start : start + part.rotary_dim] = True
    first = 0
    for old, new in zip(chunks(before), chunks(after), strict=True):
        if not ((old == new).all(axis=1) | moved[first : first + len(old)]).all():
            _refuse(name, "other bytes in rows that are not rotated")
        first += len(old)


def _compare_layer(
    plan: Plan,
    layer: int,
    roles: Mapping[str, list[tuple[str, Part]]],
    rope: Rope,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    generator: torch.Generator,
) -> float:
    """Compare the scores of all heads of a layer. Return their largest difference, divided by the largest score.

    Raises:
        RopeError: the quotient is more than `_TOLERANCE`.
    """
    positions = torch.randint(0, _FARTHEST, (_TOKENS,), generator=generator)
    inputs: dict[int, torch.Tensor] = {}
    vectors = []
    for tensors, pairing in ((before, plan.source.pairing), (after, plan.to)):
        rotation = _rotation(rope, pairing, positions)
        sides = {
            role: rotation(_vectors(parts, tensors, inputs, generator), layout="thd")
            for role, parts in roles.items()
            if parts
        }
        vectors.append(sides)
    worst = largest = 0.0
    pairs = [("q", "k")] if roles["q"] and roles["k"] else [(role, role) for role in ("q", "k") if roles[role]]
    for a, b in pairs:
        reference_scores, converted_scores = (_scores(sides[a], sides[b]) for sides in vectors)
        worst, largest = float((reference_scores - converted_scores).abs().max()), float(reference_scores.abs().max())
    if not math.isfinite(largest):
        must, fix = f"the scores of layer {layer} in SRC must be finite to be compared", "Convert without --verify."
        raise _checks.error("convert --verify", must, f"{largest}", f"Nothing was written. {fix}")
    if not worst <= _TOLERANCE * max(largest, 1e-30):
        _refuse(f"layer {layer}", f"scores that differ by {worst / max(largest, 1e-30):.1e} of the largest")
    return worst / max(largest, 1e-30)


def _rotation(rope: Rope, pairing: Pairing, positions: torch.Tensor) -> Rotation:
    """Return the float64 rotation, at these positions, of heads that consist of the rotated channels alone."""
    static = rope if rope.is_static else rope.at_length(_FARTHEST)
    width = static.rotary_dim
    alone = replace(static, head_dim=width, rotary_dim=width, rotary_offset=0, pairing=pairing, axes=None)
    return alone.at(positions, dtype=torch.float64)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the scores of each head of q with the head of k that it attends to, `[heads, tokens, tokens]`."""
    heads = max(q.shape[1], k.shape[1])
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    return torch.einsum("qhc,khc->hqk", q, k)


def _vectors(
    parts: Iterable[tuple[str, Part]],
    tensors: Mapping[str, Tensor],
    inputs: dict[int, torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    """Compute the rotated channels of q or k for random input.

    The input is multiplied by the weight of the projection, and the projection's bias is added. If a norm follows, the
    sum is multiplied by the weight of the norm, and the norm's bias is added. An adapter may have a bias or a norm
    without a projection, whose numbers are then the channels.

    Args:
        parts: the names of the tensors of q or k in one layer, with their rotated rows.
        tensors: all tensors by name.
        inputs: maps the number of channels of an input to that input. A missing input is drawn from `generator` and
            added to the dict.
        generator: the source of randomness.

    Returns:
        float64 `[tokens, heads, rotary_dim]`.
    """
    result = torch.zeros(_TOKENS, 1, 1, dtype=torch.float64)
    steps = sorted(parts, key=lambda step: (step[1].kind == "norm", step[0].endswith("bias"), step[0]))
    for name, part in steps:
        tensor = as_column(tensors[name]) if part.kind == "norm" else tensors[name]
        rows = [
            _values(tensor.read(start, start + part.rotary_dim), tensor.dtype).reshape(part.rotary_dim, -1)
            for start in part.starts
        ]
        if part.kind == "proj" and len(tensor.shape) == 2:
            width = tensor.shape[1]
            if width not in inputs:
                inputs[width] = torch.randn(_TOKENS, width, generator=generator, dtype=torch.float64)
            result = result + torch.stack([inputs[width] @ head.T for head in rows], dim=1)
        else:
            vector = torch.stack([head[:, 0] for head in rows])  # [heads, rotary_dim], or [1, rotary_dim] for all
            multiplies = part.kind == "norm" and not name.endswith("bias") and bool(result.any())
            result = result * vector if multiplies else result + vector
    return result


def _values(rows: Bytes, dtype: str) -> torch.Tensor:
    return torch.from_numpy(rows.copy()).view(_TORCH[dtype]).to(torch.float64)


def _refuse(subject: str, came: str) -> None:
    must = f"{subject} must give the same attention before and after"
    fix = "Nothing was written. Run the command again, and if it says the same, report it with the config."
    raise _checks.error("convert --verify", must, came, fix)
