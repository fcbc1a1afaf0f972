"""The kernel that attends over the keys and values of a cache, against the definition of attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_cases import Case, check, draw, long_rows
from ropewalk.attention.cached import VisibleKeys, attend_cached
from ropewalk.kernels import backend

if not backend.FAST_PATH:
    pytest.skip("no compiled kernel", allow_module_level=True)

import ropewalk.kernels._cpu as _cpu

LEVELS = _cpu.levels()


def attend(case: Case) -> Tensor | None:
    with torch.no_grad():
        return attend_cached(case.q, case.far_q, case.keys, case.values, case.visible, scale=case.scale)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition(level: str, seed: int) -> None:
    _cpu.use_level(level)
    try:
        case = draw(seed)
        check(case, attend(case))
    finally:
        _cpu.use_level(LEVELS[-1])


@pytest.mark.parametrize("lengths", [[1500], [2, 1500], [1500, 2, 2], [700, 800, 900, 2]], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_rows_are_divided_among_threads(lengths: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = long_rows(lengths)
        check(case, attend(case))
    finally:
        torch.set_num_threads(before)


class TestNaN:
    def test_in_keys_that_nobody_sees(self) -> None:
        case = long_rows([5, 100])
        case.keys[0, 5:], case.values[0, 5:] = torch.nan, torch.nan
        check(case, attend(case))

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
