"""Gradients of the kernels through public calls, compared with float64 formulas and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, as_bshd, check, expected, shape
from ropewalk import Rotation

BATCH, SEQ, HEADS, DIM, PAIRS, OFFSET = 2, 5, 3, 92, 39, 6
RANKS = {"pairs": (PAIRS,), "seq": (SEQ, PAIRS), "one row": (1, SEQ, PAIRS), "rows": (BATCH, SEQ, PAIRS)}


def made(layout: str, dtype: torch.dtype = torch.float32, heads: int = HEADS, wants: bool = True) -> Tensor:
    return torch.randn(shape(layout, BATCH, SEQ, heads, DIM)).to(dtype).requires_grad_(wants)


def rotation(cos: Tensor, sin: Tensor, pairing: str) -> Rotation:
    return Rotation(cos, sin, pairing=pairing, head_dim=DIM, rotary_offset=OFFSET)


def check_back(grad: Tensor | None, incoming: Tensor, cos: Tensor, sin: Tensor, layout: str, pairing: str) -> None:
    """Check that the gradient to x is the inverse rotation of the incoming gradient."""
    assert grad is not None
    check(grad, *expected(incoming, cos, sin, layout, pairing, OFFSET, inverse=True), layout, "gradient")


def check_tables(
    cos: Tensor, sin: Tensor, parts: list[tuple[Tensor, Tensor]], layout: str, pairing: str, rtol: float
) -> None:
    """Check the gradients to the tables, summed over all uses. parts: pairs of x and its incoming gradient."""
    sums = [oracle.table_gradient(as_bshd(x, layout), as_bshd(g, layout), PAIRS, pairing, OFFSET) for x, g in parts]
    for table, which in ((cos, 0), (sin, 1)):
        exact, size = sum(s[which] for s in sums), sum(s[2] for s in sums)
        axes = (0, 1) if table.ndim == 1 else (0,)
        if table.ndim < 3 or table.shape[0] == 1:
            exact, size = (a.sum(axes, keepdims=table.ndim == 3) for a in (exact, size))
        assert table.grad is not None
        assert table.grad.shape == table.shape
        assert table.grad.dtype == table.dtype
        assert (abs(table.grad.double().numpy() - exact) <= rtol * size).all()


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_incoming_gradients_of_any_strides(calls: list[str], level: str, dtype: torch.dtype, pairing: str) -> None:
    torch.manual_seed(1)
    cos, sin = torch.randn(SEQ, PAIRS), torch.randn(SEQ, PAIRS)
    size = shape("bshd", BATCH, SEQ, HEADS, DIM)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda y: y.sum(),
        "mean over heads": lambda y: y.float().mean(2).pow(2).sum(),
        "one channel": lambda y: y[..., OFFSET].float().pow(2).sum(),
        "transposed": lambda y: (y.transpose(1, 3) * torch.randn(BATCH, DIM, HEADS, SEQ).to(dtype)).float().sum(),
        "norm of channels": lambda y: y.float().norm(dim=-1).sum(),
    }
    for name, loss in ways.items():
        q = made("bshd", dtype)
        y = rotation(cos, sin, pairing)(q, layout="bshd")
        seen: list[Tensor] = []
        y.register_hook(seen.append)
        loss(y).backward()
        assert seen[0].shape == size
        assert name != "sum" or seen[0].stride() == (0, 0, 0, 0)
        check_back(q.grad, seen[0], cos, sin, "bshd", pairing)
    assert set(calls) == {"rotate"}


@pytest.mark.parametrize(
    ("layout", "rank"), [(layout, rank) for layout in LAYOUTS for rank in RANKS if layout != "thd" or "row" not in rank]
)
@pytest.mark.parametrize("pairing", PAIRINGS)
class TestToTables:
    def test_is_the_sum(self, calls: list[str], layout: str, pairing: str, rank: str) -> None:
        torch.manual_seed(2)
        for dtype, table_dtype, rtol in (
            (torch.float32, torch.float32, 1e-5),  # float32: some 200 roundings of 6e-8
            (torch.float32, torch.float64, 1e-5),
            (torch.float64, torch.float32, 1e-7),  # rounded to the dtype of the table
            (torch.float64, torch.float64, 1e-13),
            (torch.bfloat16, torch.float32, 1e-5),
        ):
            q, k = made(layout, dtype), made(layout, dtype, heads=1)
            cos, sin = (torch.randn(RANKS[rank], dtype=table_dtype, requires_grad=True) for _ in range(2))
            incoming = [torch.randn(x.shape).to(dtype) for x in (q, k)]
            torch.autograd.backward(rotation(cos, sin, pairing)(q, k, layout=layout), incoming)
            check_tables(cos, sin, list(zip((q, k), incoming, strict=True)), layout, pairing, rtol)
            check_back(q.grad, incoming[0], cos, sin, layout, pairing)
            check_back(k.grad, incoming[1], cos, sin, layout, pairing)
        assert set(calls) == {"rotate", "table_gradient"}


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_of_the_gradient_to_tables(calls: list[str], pairing: str) -> None:
    """Σ W·d_cos + V·d_sin = incoming · (x rotated by W, V). gradgradcheck does not detect a missing gradient."""
    torch.manual_seed(11)
    q = made("bshd", torch.float64)
    cos, sin = (torch.randn(SEQ, PAIRS, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, v = (torch.randn(SEQ, PAIRS, dtype=torch.float64) for _ in range(2))
    incoming = torch.randn_like(q).requires_grad_()
    y = rotation(cos, sin, pairing)(q, layout="bshd")
    d_cos, d_sin = torch.autograd.grad(y, (cos, sin), incoming, create_graph=True)
    by_q, by_incoming = torch.autograd.grad((w * d_cos + v * d_sin).sum(), (q, incoming))
    still = torch.ones(DIM, dtype=torch.float64)
    still[:OFFSET] = still[OFFSET + 2 * PAIRS :] = 0  # unrotated channels
    for mine, x, inverse in ((by_q, incoming, True), (by_incoming, q, False)):
        exact, size = expected(x, w, v, "bshd", pairing, OFFSET, inverse=inverse)
        check(mine, exact * still.numpy(), size, "bshd", inverse)


@pytest.mark.parametrize("wants", [(q, k, c, s) for q in (0, 1) for k in (0, 1) for c in (0, 1) for s in (0, 1)])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_combination_of_required_gradients(calls: list[str], wants: tuple[int, ...], in_place: bool) -> None:
    torch.manual_seed(6)
    q, k = (made("bshd", heads=heads, wants=bool(wants[i])) for i, heads in enumerate((HEADS, 1)))
    cos, sin = (torch.randn(SEQ, PAIRS, requires_grad=bool(wants[2 + i])) for i in range(2))
    rotate, before = rotation(cos, sin, "half"), [q.detach().clone(), k.detach().clone()]
    if in_place:
        rotated = [q * 1, k * 1]
        rotate.apply_(*rotated, layout="bshd")
    else:
        rotated = list(rotate(q, k, layout="bshd"))
    for x, y, wanted in zip(before, rotated, wants, strict=False):
        check(y, *expected(x, cos, sin, "bshd", "half", OFFSET, inverse=False), "bshd", wants)
        assert y.requires_grad == bool(wanted or wants[2] or wants[3])
    incoming = [torch.randn_like(y) for y in rotated]
    recorded = [(y, grad) for y, grad in zip(rotated, incoming, strict=True) if y.requires_grad]
    if recorded:
        torch.autograd.backward([y for y, _ in recorded], [grad for _, grad in recorded])
    for x, grad in zip((q, k), incoming, strict=True):
        if x.requires_grad:
            check_back(x.grad, grad, cos, sin, "bshd", "half")
        assert (x.grad is None) != x.requires_grad
    tables = [table.detach().clone() for table in (cos, sin)]
    for twin, table in zip(tables, (cos, sin), strict=True):
        twin.grad = table.grad if table.requires_grad else None
        assert (table.grad is None) != table.requires_grad
    if wants[2] and wants[3]:
        check_tables(*tables, list(zip(before, incoming, strict=True)), "bshd", "half", 1e-5)
    assert "rotate" in calls


@pytest.mark.parametrize("learned", [False, True])
def test_unused_outputs_have_no_gradient(calls: list[str], learned: bool) -> None:
    """No gradient is created for an unused output, not even zeros."""
    torch.manual_seed(7)
    cos, sin = (torch.randn(SEQ, PAIRS, requires_grad=learned) for _ in range(2))
    for used in (0, 1):
        both = made("bshd"), made("bshd", heads=1)
        y = rotation(cos, sin, "half")(*both, layout="bshd")[used]
        incoming = torch.randn_like(y)
        cos.grad = sin.grad = None
        y.backward(incoming)
        check_back(both[used].grad, incoming, cos, sin, "bshd", "half")
        assert both[1 - used].grad is None
        if learned:
            check_tables(cos, sin, [(both[used], incoming)], "bshd", "half", 1e-5)
    assert calls.count("rotate") == 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_under_checkpoint(calls: list[str], threads: None, reentrant: bool, count: int) -> None:
    """The backward pass repeats the rotation, possibly in another thread."""
    torch.set_num_threads(count)
    torch.manual_seed(8)
    seq = 331  # enough for two threads
    q = torch.randn(2, seq, 2, 64, requires_grad=True)
    cos, sin = (torch.randn(seq, 32, requires_grad=True) for _ in range(2))

    def block(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Rotation(cos, sin, pairing="half")(q, layout="bshd").square()

    incoming = torch.randn(2, seq, 2, 64)
    checkpoint(block, q, cos, sin, use_reentrant=reentrant).backward(incoming)
    exact, _ = expected(q, cos, sin, "bshd", "half", 0, inverse=False)
    grad = torch.from_numpy(2 * exact * incoming.double().numpy())
    # Numbers up to about 50, each the sum of four float32 products.
    np.testing.assert_allclose(
        q.grad, expected(grad, cos, sin, "bshd", "half", 0, inverse=True)[0], rtol=1e-5, atol=1e-4
    )
    d_cos, d_sin, _ = oracle.table_gradient(q.detach().double().numpy(), grad.numpy(), 32, "half")
    # Measured over 20 seeds: at most 4.7e-6 more than the relative part.
    np.testing.assert_allclose(cos.grad, d_cos.sum(0), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(sin.grad, d_sin.sum(0), rtol=1e-5, atol=2e-5)
    assert calls == ["rotate", "rotate", "rotate", "table_gradient"]


def test_lazily_negated_tensors(used: None) -> None:
    """`conj().imag` is a view with the negative bit: its memory has the opposite values."""
    torch.manual_seed(10)
    table, other = torch.randn(2, SEQ, PAIRS, dtype=torch.complex64).conj()
    q, k = torch.randn(2, *shape("bshd", BATCH, SEQ, HEADS, DIM), dtype=torch.complex64).conj().imag
    assert table.imag.is_neg()
    assert q.is_neg()
    cos, sin = table.imag, other.imag
    plain = [x.clone() for x in (q, k)]  # a clone is resolved
    rotated = rotation(cos, sin, "half")(q, k, layout="bshd")
    for x, y in zip(plain, rotated, strict=True):
        check(y, *expected(x, cos, sin, "bshd", "half", OFFSET, inverse=False), "bshd", "new tensors")
    wants = plain[0].requires_grad_()
    rotation(cos, sin, "half")(wants, layout="bshd").backward(k)
    check_back(wants.grad, k, cos, sin, "bshd", "half")
    rotation(cos, sin, "half").apply_(q, layout="bshd")
    check(q, *expected(plain[0], cos, sin, "bshd", "half", OFFSET, inverse=False), "bshd", "in place")


def test_parameters_are_plain_tensors(calls: list[str]) -> None:
    cos, sin = (torch.nn.Parameter(torch.randn(SEQ, PAIRS)) for _ in range(2))
    q, incoming = torch.nn.Parameter(made("bshd").detach()), torch.randn(shape("bshd", BATCH, SEQ, HEADS, DIM))
    y = rotation(cos, sin, "half")(q, layout="bshd")
    y.backward(incoming)
    check(y, *expected(q, cos, sin, "bshd", "half", OFFSET, inverse=False), "bshd", "parameters")
    check_back(q.grad, incoming, cos, sin, "bshd", "half")
    check_tables(cos, sin, [(q, incoming)], "bshd", "half", 1e-5)
    assert calls == ["rotate", "rotate", "table_gradient"]
