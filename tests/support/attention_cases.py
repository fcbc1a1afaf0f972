"""Random calls of the kernels that attend over a cache, and their results by the definition of attention in float64."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.kernels.visible import VisibleKeys

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


@dataclass
class Case:
    """Random queries and a pool of keys, with the keys of each row in some blocks, and NaN where nobody sees it."""

    q: Tensor
    far_q: Tensor | None
    keys: Tensor
    values: Tensor
    visible: VisibleKeys
    scale: float


def draw(seed: int) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    batch, seq, kv_heads, group = (
        rng.choice([1, 2, 5]),
        rng.choice([1, 1, 2, 5, 8]),
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3, 7, 8]),
    )
    head_dim, size, blocks = rng.choice([16, 64, 72, 80, 128, 200]), rng.choice([1, 16, 40]), rng.choice([1, 3, 9])
    paged = rng.random() < 0.6

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = batch * blocks + 2 if paged else batch
    slots = size if paged else size * blocks
    shape = (pool, slots, kv_heads, head_dim)
    keys, values = normal(*shape), normal(*shape)
    if rng.random() < 0.4:  # heads before tokens in memory
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    total = size * blocks
    counts = torch.tensor([rng.choice([total, rng.randint(0, total)]) for _ in range(batch)])
    order = (counts[:, None] - seq + torch.arange(seq)).clamp(min=0)
    table = torch.randperm(pool, generator=generator)[: batch * blocks].view(batch, blocks).int() if paged else None
    sinks, given = rng.choice([0, 0, 4]), counts if rng.random() < 0.7 else None
    visible = VisibleKeys(order, total, table, given, rng.choice([None, 1, 33]), sinks)
    if not paged and total > 2 * (seq + 4) and rng.random() < 0.7:  # rows that are longer than their slots
        order, ring = order + rng.choice([0, 1, total, 5 * total + 3]), total - rng.choice([sinks, 4])
        visible = VisibleKeys(order, total, None, None, rng.randint(1, ring - seq + 1), sinks, ring=ring)
    hide_unseen(keys, values, visible)
    q = normal(batch, seq, kv_heads * group, head_dim) * rng.choice([1, 5])
    far_q = normal(*q.shape) if sinks and rng.random() < 0.8 else None
    return Case(q, far_q, keys, values, visible, rng.choice([head_dim**-0.5, 0.3]))


def in_8_bits(case: Case, dtype: torch.dtype, head_dim: int = 200) -> Case:
    """Return a case with other keys and values, of up to head_dim channels in 8 bits, with a scale for each head."""
    unseen, generator = case.keys[..., 0, 0].isnan(), torch.Generator().manual_seed(0)
    q, far_q, keys = (None if x is None else x[..., :head_dim] for x in (case.q, case.far_q, case.keys))
    kept = []
    for _ in range(2):
        bits = torch.randint(256, keys.shape, generator=generator, dtype=torch.uint8)
        bits = torch.empty_like(keys, dtype=torch.uint8).copy_(torch.where(bits & 127 == 127, 0, bits))  # no NaN
        bits[unseen] = 127
        scales = torch.rand(keys.shape[:3], generator=generator).masked_fill_(unseen[..., None], torch.nan) / 30
        kept += [bits.view(dtype), scales.transpose(0, 1).contiguous().transpose(0, 1)]
    visible = case.visible._replace(key_scales=kept[1], value_scales=kept[3])
    return Case(q, far_q, kept[0], kept[2], visible, case.scale)


def every_number(dtype: torch.dtype, group: int = 1) -> tuple[Case, Tensor]:
    """Return a case and its exact result, also NaN: row i has one key, whose value has number i in all channels."""
    kept = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(256, 1, 1, 40).contiguous().view(dtype)
    scales, order = torch.full((256, 1, 1), 0.25), torch.zeros(256, 1, dtype=torch.int64)
    visible = VisibleKeys(order, 1, key_scales=scales, value_scales=scales)
    case = Case(torch.zeros(256, 1, group, 40), None, torch.zeros_like(kept), kept, visible, 1.0)
    return case, (kept.float() / 4).expand_as(case.q)


def places_of(visible: VisibleKeys, row: int, size: int) -> list[tuple[int, int]]:
    """Return the block and the slot of each key that a row has."""
    count = visible.keys if visible.counts is None else min(visible.keys, int(visible.counts[row]))
    blocks = [row] if visible.blocks is None else visible.blocks[row].tolist()
    if visible.ring:  # a slot for each key of the row in turn, most of which are overwritten later
        front = visible.keys - visible.ring
        return [
            (row, i if i < front else front + (i - front) % visible.ring)
            for i in range(int(visible.order[row].max()) + 1)
        ]
    return [(blocks[i // size], i % size) for i in range(count)]


def seen_by(visible: VisibleKeys, row: int, token: int, count: int) -> list[int]:
    """Return the keys that a token attends to, of `count` keys of its row."""
    window, seen = visible.window or 10**9, []
    for i in range(count):
        distance = int(visible.order[row, token]) - i
        if distance >= 0 and (distance < window or i < visible.sinks):
            seen.append(i)
    return seen


def hide_unseen(keys: Tensor, values: Tensor, visible: VisibleKeys) -> None:
    """Put NaN into every slot that nobody sees, also in blocks that no row has."""
    unseen, (rows, tokens) = torch.ones(keys.shape[:2], dtype=torch.bool), visible.order.shape
    for row in range(rows):
        places = places_of(visible, row, keys.shape[1])
        for token in range(tokens):
            for i in seen_by(visible, row, token, len(places)):
                unseen[places[i]] = False
    keys[unseen], values[unseen] = torch.nan, torch.nan


def define(case: Case) -> tuple[Tensor, Tensor]:
    """Return attention in float64, and a bound of the error of float32 arithmetic before the result is rounded."""
    visible, (batch, seq, heads, channels) = case.visible, case.q.shape
    out, bound = (torch.zeros(batch, seq, heads, case.values.shape[3], dtype=torch.float64) for _ in range(2))
    group = heads // case.keys.shape[2]
    keys, values = (
        x.double() if scales is None else x.double() * scales.double()[..., None]
        for x, scales in ((case.keys, visible.key_scales), (case.values, visible.value_scales))
    )
    for row in range(batch):
        places = places_of(visible, row, case.keys.shape[1])
        for token in range(seq):
            seen = seen_by(visible, row, token, len(places))
            if not seen:
                continue
            block, slot = torch.tensor([places[i] for i in seen]).unbind(1)
            for head in range(heads):
                k, v = (x[block, slot, head // group] for x in (keys, values))
                q = torch.stack(
                    [
                        (case.far_q if case.far_q is not None and i < visible.sinks else case.q)[
                            row, token, head
                        ].double()
                        for i in seen
                    ]
                )
                scores = case.scale * (q * k).sum(1)
                out[row, token, head] = scores.softmax(0) @ v
                unit = 2.0**-24  # half a unit in the last place of 1 in float32
                of_scores = (channels + 8) * unit * case.scale * float((q * k).abs().sum(1).max()) + 4 * unit
                bound[row, token, head] = (2 * of_scores + (len(seen) + 8) * unit) * v.abs().max()
    return out, bound


def check(case: Case, attended: Tensor | None, *, truncated: bool = False) -> None:
    """Compare with the definition. truncated: it was truncated and not rounded, as Triton's interpreter does."""
    assert attended is not None
    assert (attended.dtype, attended.shape) == (case.q.dtype, (*case.q.shape[:3], case.values.shape[3]))
    expected, bound = define(case)
    number = torch.finfo(case.q.dtype)
    rounding = expected.abs() * number.eps * (1 if truncated else 0.5) + number.tiny
    assert bool(((attended.double() - expected).abs() <= bound + rounding).all())


def long_rows(lengths: list[int]) -> Case:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(len(lengths), max(lengths), 2, 64, generator=generator) for _ in range(2))
    q = torch.randn(len(lengths), 2, 4, 64, generator=generator)
    order = torch.tensor(lengths)[:, None] - torch.tensor([2, 1])
    return Case(q, None, keys, values, VisibleKeys(order, max(lengths)), 0.125)


def interpret_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 numbers as integers, which its `tl.dot` would multiply. Widen them."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != language.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
