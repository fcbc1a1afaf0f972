"""Layouts: every module derives the axes of a layout from its name."""

from __future__ import annotations

import pytest
import torch

import oracle
from kernel_cases import PAIRINGS, as_bshd, check, expected, shape
from ropewalk import RopeError, Rotation, _layout
from ropewalk._layout import Options
from ropewalk.kernels import backend, gpu_plans

BATCH, SEQ, HEADS, DIM, PAIRS, OFFSET = 2, 5, 3, 14, 4, 5


def test_axes_of_each() -> None:
    """The expected axes, written out: batch, tokens, heads, and their number."""
    assert _layout.AXES == {
        "bshd": (0, 1, 2, 4),
        "bhsd": (0, 2, 1, 4),
        "sbhd": (1, 0, 2, 4),
        "thd": (None, 0, 1, 3),
    }


# Every order of the axes before head_dim: the layouts of ropewalk, and all others.
@pytest.fixture(params=["bshd", "bhsd", "sbhd", "thd", "hbsd", "hsbd", "shbd", "htd"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name not in _layout.AXES:
        with pytest.raises(RopeError, match="layout must be one of 'bshd', 'bhsd', 'sbhd', 'thd'"):
            Rotation(torch.ones(3, 1), torch.ones(3, 1), pairing="half")(torch.ones(3, 3, 3, 2), layout=name)  # type: ignore[call-overload]
        monkeypatch.setitem(_layout.AXES, name, _layout.axes_of(name))
    return name


def tables_of(layout: str) -> list[tuple[int, ...]]:
    return [(PAIRS,), (SEQ, PAIRS), *([] if "b" not in layout else [(1, SEQ, PAIRS), (BATCH, SEQ, PAIRS)])]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("by", ["kernel", "reference"])
def test_another_layout_is_one_entry(layout: str, pairing: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors, in place, and gradients to q, k, cos and sin, by the kernel and by the reference."""
    torch.manual_seed(0)
    if by == "reference":
        monkeypatch.setattr(backend, "kernel_for", lambda *tensors: None)
    for size in tables_of(layout):
        q, k, g, h = (torch.randn(shape(layout, BATCH, SEQ, heads, DIM)) for heads in (HEADS, 1, HEADS, 1))
        cos, sin = (torch.randn(size, requires_grad=True) for _ in range(2))
        rotation = Rotation(cos, sin, pairing=pairing, head_dim=DIM, rotary_offset=OFFSET)  # type: ignore[arg-type]
        rotated = rotation(q.requires_grad_(), k.requires_grad_(), layout=layout)  # type: ignore[call-overload]
        torch.autograd.backward(rotated, [g, h])
        with torch.no_grad():
            mine = [q.clone(), k.clone()]
            rotation.apply_(*mine, layout=layout)  # type: ignore[arg-type]
        for x, new, changed, incoming in zip((q, k), rotated, mine, (g, h), strict=True):
            exact = expected(x, cos, sin, layout, pairing, OFFSET, inverse=False)
            check(new, *exact, layout, "new")
            check(changed, *exact, layout, "in place")
            assert x.grad is not None
            check(x.grad, *expected(incoming, cos, sin, layout, pairing, OFFSET, inverse=True), layout, "gradient")
        parts = [
            oracle.table_gradient(as_bshd(x, layout), as_bshd(grad, layout), PAIRS, pairing, OFFSET)
            for x, grad in ((q, g), (k, h))
        ]
        for table, which in ((cos, 0), (sin, 1)):
            exact, size_of_terms = (sum(part[i] for part in parts) for i in (which, 2))
            axes = tuple(range(2))[: 3 - table.ndim] if table.ndim < 3 else (0,) if table.shape[0] == 1 else ()
            exact, size_of_terms = (a.sum(axes, keepdims=table.ndim == 3) for a in (exact, size_of_terms))
            assert table.grad is not None
            # float32: the roundings of some 40 products and sums
            assert (abs(table.grad.double().numpy() - exact) <= 40 * 2.0**-24 * size_of_terms).all()


def test_invalid_tensors_in_another_layout(layout: str) -> None:
    rotation = Rotation(torch.ones(BATCH, SEQ, PAIRS), torch.ones(BATCH, SEQ, PAIRS), pairing="half")
    for batch, seq, message in ((BATCH, SEQ + 1, "must have 5 tokens"), (BATCH + 1, SEQ, "must have batch size 2")):
        x = torch.ones(shape(layout, batch, seq, HEADS, 2 * PAIRS))
        said = message if "b" in layout or "tokens" in message else f"layout '{layout}' has no batch axis"
        with pytest.raises(RopeError, match=said):
            rotation(x, layout=layout)  # type: ignore[call-overload]


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_launch_on_a_gpu(layout: str, pairing: str) -> None:
    """A view in another order of axes is launched as the same memory in the order of "bshd"."""
    given = torch.randn(BATCH if "b" in layout else 1, SEQ, HEADS, DIM)
    x = (
        given.permute(["bshd".index(axis) for axis in layout])
        if "b" in layout
        else (given[0] if layout == "thd" else given[0].transpose(0, 1))
    )
    cos = torch.ones(SEQ, PAIRS)
    interleaved = pairing == "interleaved"
    plan, _ = gpu_plans.rotation_launch([x], [x], cos, cos, Options(layout, interleaved, OFFSET, False))
    wanted, _ = gpu_plans.rotation_launch([given], [given], cos, cos, Options("bshd", interleaved, OFFSET, False))
    numbers = wanted.numbers
    if "b" not in layout:
        numbers = numbers | dict.fromkeys(("q_b", "p_b", "k_b", "r_b"), 0)
    assert (plan.programs, plan.numbers, plan.warps) == (wanted.programs, numbers, wanted.warps)
