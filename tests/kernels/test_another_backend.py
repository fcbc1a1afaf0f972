"""A backend from outside: one object with the functions of `backend.Kernels`, and one entry of `backend.KERNELS`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attention_cases
import oracle
from attention_cases import Case
from kernel_cases import check, expected
from ropewalk import KVCache, QKNorm, Rope, Rotation
from ropewalk._layout import Options
from ropewalk.attention.few_tokens import attend_cached
from ropewalk.kernels import backend
from ropewalk.kernels.visible import VisibleKeys


class MadeUp:
    """A backend from outside, for the CPU: it counts its calls, and computes with NumPy and the oracle."""

    device_name = "Abacus"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def unavailable(self, device: torch.device | None = None) -> str | None:
        return None

    def version(self) -> str:
        return "wooden"

    def rotate(self, tensors: list[Tensor], outputs: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> None:
        self.calls.append("rotate")
        pairing = "interleaved" if options.interleaved else "half"
        for x, y in zip(tensors, outputs, strict=True):
            exact, _ = expected(x, cos, sin, options.layout, pairing, options.offset, options.inverse)
            y.copy_(torch.from_numpy(exact))

    def table_gradient(
        self, tensors: list[Tensor], grads: list[Tensor], pairs: int, options: Options, per_head: bool = False
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("table_gradient")
        pairing = "interleaved" if options.interleaved else "half"
        sums = [torch.zeros(()), torch.zeros(())]
        for x, grad in zip(tensors, grads, strict=True):
            exact = oracle.table_gradient(x.double().numpy(), grad.double().numpy(), pairs, pairing, options.offset)
            sums = [total + torch.from_numpy(part).float() for total, part in zip(sums, exact[:2], strict=True)]
        return sums[0], sums[1]

    def angles(
        self, positions: Tensor, phase_steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("angles")
        exact = oracle.cos_sin_of_steps(positions.tolist(), phase_steps.tolist())
        return tuple(torch.from_numpy(factor * table).to(dtype) for table in exact)  # type: ignore[return-value]

    def step(
        self, tensors: Any, outputs: Any, cos: Tensor, sin: Tensor, options: Options, norm: Any, store: Any
    ) -> None:
        self.calls.append("step")
        weights, eps, add_one = norm[:2], norm[2], norm[3]
        for x, y, weight in zip(tensors, outputs, weights, strict=True):
            exact = oracle.rms_norm(x.double().numpy(), weight.double().numpy(), eps, add_one)
            self.rotate([torch.from_numpy(exact.astype(np.float64))], [y], cos, sin, options)
        del self.calls[-2:]  # of the two rotations inside

    def attend(
        self, q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
    ) -> Tensor:
        self.calls.append("attend")
        return attention_cases.define(Case(q, far_q, keys, values, visible, scale))[0].to(q.dtype)


def test_a_backend_from_outside_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles, rotations, their operator, gradients to q, k and the tables, and the fused step go to the backend."""
    made = MadeUp()
    monkeypatch.setitem(backend.KERNELS, "cpu", made)
    monkeypatch.setattr(backend, "FAST_PATH", False)
    monkeypatch.setattr(backend, "BACKEND", "auto")
    assert backend.backends()["abacus kernel"] == "usable: wooden"
    rotation = Rope(8, 1e4, "half").at(torch.arange(5))
    tables = rotation.cos, rotation.sin
    q, k, g = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8), torch.randn(2, 5, 3, 8)
    assert made.calls == ["angles"]
    for x, y in zip((q, k), rotation(q, k, layout="bshd"), strict=True):
        check(y, *expected(x, *tables, "bshd", "half", 0, False), "bshd", "new")
    with torch.overrides.BaseTorchFunctionMode():  # which sees operators
        check(rotation(q, layout="bshd"), *expected(q, *tables, "bshd", "half", 0, False), "bshd", "")
    mine = q.clone()
    rotation.apply_(mine, layout="bshd")
    check(mine, *expected(q, *tables, "bshd", "half", 0, False), "bshd", "in place")
    assert made.calls[1:] == ["rotate"] * 3
    cos, sin = (table.clone().requires_grad_() for table in tables)
    Rotation(cos, sin, pairing="half")(q.requires_grad_(), layout="bshd").backward(g)
    assert made.calls[4:] == ["rotate", "rotate", "table_gradient"]
    assert q.grad is not None
    check(q.grad, *expected(g, cos, sin, "bshd", "half", 0, True), "bshd", "gradient")
    exact, _, size = oracle.table_gradient(q.detach().numpy(), g.numpy(), 4, "half", 0)
    assert cos.grad is not None
    assert (abs(cos.grad.numpy() - exact.sum(0)) <= 1e-5 * size.sum(0)).all()
    norm = QKNorm(torch.randn(8), torch.randn(8), eps=1e-6)
    for x, y, weight in zip(
        (q, k), norm.rotate(rotation, q.detach(), k, layout="bshd"), (norm.q_weight, norm.k_weight), strict=True
    ):
        exact = oracle.rms_norm(x.detach().double().numpy(), weight.double().numpy(), 1e-6)
        normed = torch.from_numpy(exact.astype(np.float64))
        check(y, *expected(normed, *tables, "bshd", "half", 0, False), "bshd", "step")
    assert made.calls[7:] == ["step"]


class TestAttention:
    """Attention over a cache goes to the backend, unless PyTorch must see the operators or the tensors do not fit."""

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
        made = MadeUp()
        monkeypatch.setitem(backend.KERNELS, "cpu", made)
        monkeypatch.setattr(backend, "FAST_PATH", False)
        monkeypatch.setattr(backend, "BACKEND", "auto")
        return made

    @pytest.mark.parametrize("seed", [0, 3, 5])
    def test_goes_to_the_backend(self, made: MadeUp, seed: int) -> None:
        drawn = attention_cases.draw(seed)
        for case in (drawn, attention_cases.in_8_bits(drawn, torch.int8)):
            attention_cases.check(case, attend(case))
        assert made.calls == ["attend", "attend"]

    def test_of_a_cache(self, made: MadeUp) -> None:
        q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
        whole = VisibleKeys(torch.arange(3).expand(2, 3), 3, window=2)
        exact, _ = attention_cases.define(Case(q, None, k, v, whole, 8**-0.5))
        attended = KVCache(1, 2, 2, 8, capacity=5).step(3).layer(0).attend(q, k, v, window=2)
        torch.testing.assert_close(attended, exact.float())
        assert made.calls == ["attend"]

    def test_is_left_to_pytorch(self, made: MadeUp) -> None:
        case = attention_cases.long_rows([10])
        with torch.overrides.BaseTorchFunctionMode():
            assert attend(case) is None
        assert torch.func.vmap(lambda q: (attend(dataclasses.replace(case, q=q)), q)[1])(case.q[None]).ndim == 5
        for q, keys in (
            (case.q.double(), case.keys),
            (case.q.double(), case.keys.double()),
            (case.q, case.keys.transpose(1, 3).contiguous().transpose(1, 3)),
            (case.q.clone().requires_grad_(), case.keys),
            (case.q, torch._neg_view(case.keys)),
            (case.q.as_subclass(Special), case.keys),
        ):
            assert attend(dataclasses.replace(case, q=q, keys=keys, values=keys)) is None
        assert made.calls == []


class Special(Tensor):
    """A tensor that may store its elements differently."""


def attend(case: Case) -> Tensor | None:
    return attend_cached(case.q, case.far_q, case.keys, case.values, case.visible, scale=case.scale)
