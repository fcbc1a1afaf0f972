"""Attention over a cache, on a GPU or in Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import (
    EIGHT_BITS,
    Case,
    check,
    draw,
    every_number,
    in_8_bits,
    interpret_bfloat16,
    long_rows,
)
from ropewalk.kernels import gpu, gpu_plans
from ropewalk.kernels.visible import VisibleKeys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="there is no GPU; test_interpreter.py runs this in Triton's interpreter",
)


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        interpret_bfloat16(monkeypatch)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that are launched, in order."""
    names: list[str] = []
    launch = gpu._launch

    def noted(plan: gpu_plans.Plan, tensors: tuple[Tensor, ...]) -> None:
        names.append(plan.kernel)
        launch(plan, tensors)

    monkeypatch.setattr(gpu, "_launch", noted)
    return names


def attend(case: Case) -> Tensor:
    def moved(x: Any) -> Any:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    tensors = map(moved, (case.q, case.far_q, case.keys, case.values))
    attended = gpu.attend(*tensors, VisibleKeys(*map(moved, case.visible)), case.scale)
    assert attended is not None
    return attended.cpu()


def check_attend(case: Case) -> None:
    check(case, attend(case), truncated=INTERPRETED and case.q.dtype == torch.bfloat16)


@pytest.mark.parametrize("seed", range(18))
def test_equals_the_definition(seed: int) -> None:
    check_attend(draw(seed))


@pytest.mark.parametrize("seed", range(40, 54))
def test_divided_keys(seed: int, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """As few keys for each program as a tile has: some programs have no key, and some queries see none of a part."""
    monkeypatch.setattr(gpu_plans, "division", gpu_plans.Division(4, 16))
    case = draw(seed)
    check_attend(case)
    assert launched == ["attend", "combine"] or min(case.visible.keys, case.visible.window or 17) <= 16


def test_more_sinks_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some programs have only sinks, some only keys of the window, one has both."""
    monkeypatch.setattr(gpu_plans, "division", gpu_plans.Division(4, 16))
    case = long_rows([130, 20, 43])
    case.far_q = torch.randn(case.q.shape)
    case.visible = case.visible._replace(sinks=40, window=36)
    check_attend(case)


class TestKeysOf8Bits:
    @pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
    @pytest.mark.parametrize("seed", range(10))
    def test_equals_the_definition(self, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        if seed % 2:
            monkeypatch.setattr(gpu_plans, "division", gpu_plans.Division(4, 16))
        check_attend(in_8_bits(draw(seed), dtype, (33, 48, 80, 96, 200)[seed % 5]))

    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
    def test_every_number(self, dtype: torch.dtype, group: int) -> None:
        case, expected = every_number(dtype, group)
        torch.testing.assert_close(attend(case), expected, rtol=0, atol=0, equal_nan=True)

    def test_weights_times_scales_below_float16(self) -> None:
        """The values of 999 keys, with weights and scales that only together are too small for float16."""
        keys, values = torch.zeros(2, 1, 1000, 1, 16, dtype=torch.int8)
        keys[0, 0], values[0, 1:] = 100, 127
        visible = VisibleKeys(torch.tensor([[999]]), 1000, key_scales=torch.ones(1, 1000, 1))
        visible = visible._replace(value_scales=torch.full((1, 1000, 1), 2.0**-12))
        check_attend(Case(torch.ones(1, 1, 2, 16).half(), None, keys, values, visible, 9.7 / 1600))


@pytest.mark.parametrize("lengths", [[1500], [2, 1500], [1500, 2, 2], [700, 800, 900, 2]], ids=str)
def test_long_rows(lengths: list[int], launched: list[str]) -> None:
    check_attend(long_rows(lengths))
    assert launched == ["attend", "combine"]


def test_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than `combine` reads at a time."""
    monkeypatch.setattr(gpu_plans, "division", gpu_plans.Division(4, 64))
    check_attend(long_rows([2500]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_queries_than_a_tile(dtype: torch.dtype) -> None:
    q = torch.randn(1, 8, 71, 16).to(dtype)
    keys, values = torch.randn(1, 20, 1, 16).to(dtype), torch.randn(1, 20, 1, 16).to(dtype)
    check_attend(Case(q, None, keys, values, VisibleKeys(torch.arange(12, 20)[None], 20), 0.25))


def test_queries_of_any_strides() -> None:
    case = draw(11)
    assert case.far_q is not None
    case.q, case.far_q = (torch.stack((x, x), -1)[..., 1] for x in (case.q, case.far_q))
    check_attend(case)


def test_nothing_to_do(launched: list[str]) -> None:
    x = torch.randn(2, 16, 1, 8)
    assert attend(Case(x[:, :0], None, x, x, VisibleKeys(torch.zeros(2, 0, dtype=torch.int64), 16), 1.0)).numel() == 0
    assert not attend(Case(x[:, :1], None, x, x, VisibleKeys(torch.zeros(2, 1, dtype=torch.int64), 0), 1.0)).any()


def test_heads_that_are_too_large() -> None:
    x, order = torch.empty(1, 1, 1, 257), torch.zeros(1, 1, dtype=torch.int64)
    assert gpu.attend(x, None, x, x, VisibleKeys(order, 1), 1.0) is None


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("paged", [False, True])
def test_strides_of_many_gigabytes(paged: bool, group: int) -> None:
    """The third slot or block is 2³¹ elements after the first, so its offset overflows 32 bits."""
    memory = torch.empty(2**31 + 2**20, dtype=torch.float16)
    far = 2**30 + 1
    x = memory.as_strided((3, 1, 1, 16) if paged else (1, 3, 1, 16), (far, 16, 16, 1) if paged else (16, far, 16, 1))
    x.copy_(torch.randn(x.shape))
    blocks = torch.tensor([[0, 1, 2]], dtype=torch.int32) if paged else None
    case = Case(torch.randn(1, 1, group, 16).half(), None, x, x, VisibleKeys(torch.tensor([[2]]), 3, blocks), 0.25)
    if not INTERPRETED:  # a copy would not have the strides
        there = torch.empty(memory.shape, dtype=memory.dtype, device=DEVICE).as_strided(x.shape, x.stride())
        case.keys = case.values = there.copy_(x)
    attended = attend(case)
    case.keys = case.values = x
    check(case, attended)


class TestNaN:
    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("name", ["keys", "values"])
    def test_in_keys_that_somebody_sees(self, name: str, group: int) -> None:
        case = long_rows([5, 400])
        case.q = case.q[:, 1:, : 2 * group].contiguous()
        case.visible = case.visible._replace(order=case.visible.order[:, 1:])
        getattr(case, name)[1, 398] = torch.nan
        with np.errstate(invalid="ignore"):
            attended = attend(case)
        assert attended[1].isnan().all()
        assert not attended[0].isnan().any()

    def test_in_the_last_part_of_another_token(self) -> None:
        """A token without keys in a part takes nothing from it, and a token without any key is 0."""
        keys = torch.randn(1, 64, 1, 16)
        case = Case(torch.randn(1, 2, 1, 16), None, keys, keys, VisibleKeys(torch.tensor([[-1, 63]]), 64), 0.25)
        attended = attend(case)
        check(case, attended)
        assert not attended[0, 0].any()
        assert math.isfinite(attended.sum())
