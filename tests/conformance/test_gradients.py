"""Gradients that `check` judges: of functions in place, at odd sizes, and in each backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import conformance


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def unseen(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.data.copy_(turn(x.data, cos, sin))


def seen(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.copy_(turn(x, cos, sin))


class Reads(torch.autograd.Function):
    """Backward computes the size of x, which is overwritten by then, as its size before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.x, ctx.tables = x.detach(), (cos, sin)
        ctx.mark_dirty(x)
        return x.copy_(turn(x, cos, sin))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.tables
        return turn(grad, cos, -sin) + 0.01 * ctx.x, None, None


def reads(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    apply: Any = Reads.apply
    apply(x, cos, sin)


@pytest.mark.parametrize(
    ("f", "code", "says"),
    [
        (unseen, "no-gradient", "The gradient of q is that of a function that changes nothing."),
        (reads, "in-place-gradient", "The gradient of q depends on values that are overwritten."),
    ],
)
def test_in_place(f: Callable[..., None], code: str, says: str) -> None:
    (finding,) = conformance.check(f, layout="bshd").findings
    assert (finding.code, finding.says) == (code, says)
    assert finding.case == "1 head of 16 channels, 1 token"


def test_a_function_in_place_that_autograd_sees_is_right() -> None:
    assert conformance.check(seen, layout="bshd").codes == []


def test_an_accepted_finding_is_no_wrong_grade() -> None:
    report = conformance.check(unseen, layout="bshd", ignore=["no-gradient"])
    assert report.counted == []
    assert all(grade.right is not False for grade in report.grades)


def test_the_gradient_of_a_wrong_result_is_no_second_bug() -> None:
    """The forward pass counts positions from 1, and the backward pass as it should."""

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * 10_000.0 ** (-torch.arange(0, 64, 2) / 64)
        return turn(x, angles.cos(), angles.sin()).type_as(x)

    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
            ctx.positions = positions
            return rotate(x, positions + 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return rotate(grad, -ctx.positions), None

    apply: Any = Rotate.apply
    assert conformance.check(lambda x, positions: apply(x, positions)).codes == ["positions-off-by-one"]


def test_an_odd_size() -> None:
    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            ctx.tables = cos, sin
            return turn(x, cos, sin)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            cos, sin = ctx.tables
            out = turn(grad, cos, -sin)
            out[:, :, 2:3] = grad[:, :, 2:3] if grad.shape[2] == 3 else out[:, :, 2:3]
            return out, None, None

    apply: Any = Rotate.apply
    (finding,) = conformance.check(lambda x, cos, sin: apply(x, cos, sin), layout="bshd").findings
    assert (finding.code, finding.case) == ("wrong-gradient", "3 heads of 16 channels, 1 token")
    assert finding.says == "The gradient of q is that of a function that changes nothing in head 2 (counted from 0)."
