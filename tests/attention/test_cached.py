"""The kernel that attends over the keys and values of a cache, against the definition of attention in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ropewalk.attention.cached import VisibleKeys, attend_cached
from ropewalk.kernels import backend

if not backend.FAST_PATH:
    pytest.skip("no compiled kernel", allow_module_level=True)

import ropewalk.kernels._cpu as _cpu

LEVELS = _cpu.levels()


@dataclass
class Case:
    """Random queries and a pool of keys, with the keys of each row in some blocks."""

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
    first = torch.tensor([rng.choice([0, 0, 17]) for _ in range(batch)])
    counts = torch.tensor([rng.choice([total, rng.randint(0, total)]) for _ in range(batch)])
    order = first[:, None] + (counts[:, None] - seq + torch.arange(seq)).clamp(min=0)
    table = torch.randperm(pool, generator=generator)[: batch * blocks].view(batch, blocks).int() if paged else None
    sinks = rng.choice([0, 0, 4])
    visible = VisibleKeys(
        order, total, table, first, counts if rng.random() < 0.7 else None, rng.choice([None, 1, 33]), sinks
    )
    q = normal(batch, seq, kv_heads * group, head_dim) * rng.choice([1, 5])
    return Case(q, normal(*q.shape) if sinks else None, keys, values, visible, rng.choice([head_dim**-0.5, 0.3]))


def define(case: Case) -> tuple[Tensor, Tensor]:
    """Return attention in float64, and a bound of the error of float32 arithmetic before the result is rounded."""
    visible, (batch, seq, heads, channels) = case.visible, case.q.shape
    out, bound = (torch.zeros(batch, seq, heads, channels, dtype=torch.float64) for _ in range(2))
    group, size = heads // case.keys.shape[2], case.keys.shape[1]
    for row in range(batch):
        first = 0 if visible.first is None else int(visible.first[row])
        count = visible.keys if visible.counts is None else min(visible.keys, int(visible.counts[row]))
        blocks = [row] if visible.blocks is None else visible.blocks[row].tolist()
        places = [(blocks[i // size], i % size) for i in range(count)]
        for token in range(seq):
            here = int(visible.order[row, token])
            seen = [
                i
                for i in range(count)
                if first + i <= here and (not visible.window or here - first - i < visible.window)
            ]
            if not seen:
                continue
            block, slot = torch.tensor([places[i] for i in seen]).unbind(1)
            for head in range(heads):
                k, v = (x[block, slot, head // group].double() for x in (case.keys, case.values))
                q = torch.stack(
                    [
                        (case.far_q if case.far_q is not None and first + i < visible.sinks else case.q)[
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


def check(case: Case) -> None:
    with torch.no_grad():
        attended = attend_cached(case.q, case.far_q, case.keys, case.values, case.visible, scale=case.scale)
    assert attended is not None
    assert (attended.dtype, attended.shape) == (case.q.dtype, case.q.shape)
    expected, bound = define(case)
    rounding = expected.abs() * torch.finfo(case.q.dtype).eps / 2 + torch.finfo(case.q.dtype).tiny
    assert bool(((attended.double() - expected).abs() <= bound + rounding).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition(level: str, seed: int) -> None:
    _cpu.use_level(level)
    try:
        check(draw(seed))
    finally:
        _cpu.use_level(LEVELS[-1])


def long_rows(lengths: list[int]) -> Case:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(len(lengths), max(lengths), 2, 64, generator=generator) for _ in range(2))
    q = torch.randn(len(lengths), 2, 4, 64, generator=generator)
    order = torch.tensor(lengths)[:, None] - torch.tensor([2, 1])
    return Case(q, None, keys, values, VisibleKeys(order, max(lengths)), 0.125)


@pytest.mark.parametrize("lengths", [[1500], [2, 1500], [1500, 2, 2], [700, 800, 900, 2]], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_rows_are_divided_among_threads(lengths: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(long_rows(lengths))
    finally:
        torch.set_num_threads(before)


def attend(case: Case) -> Tensor | None:
    with torch.no_grad():
        return attend_cached(case.q, case.far_q, case.keys, case.values, case.visible, scale=case.scale)


class TestNaN:
    def test_in_keys_that_nobody_sees(self) -> None:
        case = long_rows([5, 100])
        case.keys[0, 5:], case.values[0, 5:] = torch.nan, torch.nan
        check(case)

    @pytest.mark.parametrize("name", ["keys", "values"])
    def test_in_keys_that_somebody_sees(self, name: str) -> None:
        case = long_rows([5, 100])
        getattr(case, name)[1, 98] = torch.nan
        attended = attend(case)
        assert attended is not None
        assert attended[1].isnan().all()
        assert not attended[0].isnan().any()


class TestLeftToPython:
    @pytest.mark.parametrize("block", [-1, 3])
    def test_blocks_outside_of_the_pool(self, block: int) -> None:
        x = torch.randn(3, 16, 1, 64)
        visible = VisibleKeys(torch.tensor([[20]]), 32, torch.tensor([[0, block]], dtype=torch.int32))
        assert attend(Case(torch.randn(1, 1, 1, 64), None, x, x, visible, 1.0)) is None

    @pytest.mark.parametrize("keys", [17, -1])
    def test_slots_outside_of_a_block(self, keys: int) -> None:
        x = torch.randn(1, 16, 1, 64)
        assert attend(Case(torch.randn(1, 1, 1, 64), None, x, x, VisibleKeys(torch.tensor([[20]]), keys), 1.0)) is None

    def test_gradients(self) -> None:
        case = long_rows([10])
        case.q.requires_grad_()
        assert attend_cached(case.q, None, case.keys, case.values, case.visible, scale=1.0) is None

    def test_float64(self) -> None:
        case = long_rows([10])
        case.q, case.keys, case.values = case.q.double(), case.keys.double(), case.values.double()
        assert attend(case) is None

    def test_transforms(self) -> None:
        case = long_rows([10])
        seen: list[object] = []

        def one(q: Tensor) -> Tensor:
            seen.append(attend_cached(q, None, case.keys, case.values, case.visible, scale=1.0))
            return q

        torch.func.vmap(one)(case.q[None])
        assert seen == [None]
