"""QKNorm, compared with the oracle; one fused call, compared bitwise with two calls; gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import oracle
from kernel_cases import DTYPES, LAYOUTS, PAIRINGS, SMALLEST_NORMAL, same, shape
from ropewalk import QKNorm, Rope, RopeError, Rotation
from ropewalk.kernels import backend, cpu

HEADS, KV_HEADS, SEQ, BATCH, EPS = 4, 2, 3, 2, 1e-5


def weights(head_dim: int, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    return [torch.randn(head_dim, **how).to(dtype).detach() for _ in range(2)]


def normal(head_dim: int, dtype: torch.dtype, **how: Any) -> QKNorm:
    return QKNorm(*weights(head_dim, dtype), eps=EPS, **how)


def separate(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor, layout: Any = "bshd") -> tuple[Tensor, Tensor]:
    return rotation(*norm(q, k), layout=layout)


def rotation_of(rope: Rope, seq: int = SEQ) -> Rotation:
    return rope.at(torch.arange(7, 7 + seq))


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_by_the_oracle(dtype: torch.dtype, add_one: bool) -> None:
    torch.manual_seed(0)
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    for head_dim in (1, 2, 3, 5, 24, 64, 96, 128, 200, 256, 513):
        for scale in (1e-3, 1.0, 300.0):
            q, k = (scale * torch.randn(2, 3, heads, head_dim) for heads in (HEADS, KV_HEADS))
            q, k = q.to(dtype), k.to(dtype)
            norm = normal(head_dim, dtype, add_one=add_one)
            for x, y, weight in zip((q, k), norm(q, k), (norm.q_weight, norm.k_weight), strict=True):
                assert (y.dtype, y.shape) == (dtype, x.shape)
                exact = oracle.rms_norm(x.double().numpy(), weight.double().numpy(), EPS, add_one)
                # Roundings of 1 + weight, two products and the root; in float64 also of the sum, one per halving.
                roundings = 4 + (head_dim.bit_length() + 3 if dtype == torch.float64 else 0)
                out = torch.finfo(dtype)
                allowed = (roundings * unit + out.eps / 2) * abs(exact) + out.smallest_normal * out.eps
                if dtype == torch.bfloat16:
                    allowed += float(SMALLEST_NORMAL)
                assert (abs(y.double().numpy() - exact) <= allowed).all(), (head_dim, scale)


@pytest.mark.parametrize("values", [[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [3e38, 3e38], [1e-30, -1e-30]])
def test_odd_values(values: list[float]) -> None:
    """Inputs whose squares overflow or underflow in float32; 0, infinity and NaN give the results of float64."""
    x, norm = torch.tensor(values).expand(1, 1, 1, 2), QKNorm(torch.ones(2), torch.ones(2), eps=1e-70)
    exact = nn.functional.rms_norm(x.double(), (2,), eps=1e-70)
    torch.testing.assert_close(norm(x, x)[0].double(), exact, equal_nan=True, rtol=3e-7, atol=0)
    rotation = Rope(head_dim=2, base=1e4, pairing="half").at(torch.zeros(1, dtype=torch.int64))
    for y, other in zip(norm.rotate(rotation, x, x, layout="bshd"), separate(norm, rotation, x, x), strict=True):
        assert same(y, other, "")


SIZES = [(2, 2, 0), (6, 6, 0), (24, 16, 4), (80, 80, 0), (96, 40, 8), (64, 64, 0), (128, 128, 0), (256, 64, 64)]
SIZES += [(512, 512, 0), (1030, 500, 3)]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestSameBits:
    def test_sizes(self, dtype: torch.dtype, pairing: Any, fused: list[bool]) -> None:
        torch.manual_seed(2)
        for i, (head_dim, rotary_dim, offset) in enumerate(SIZES):
            rope = Rope(head_dim=head_dim, base=1e4, pairing=pairing, rotary_dim=rotary_dim, rotary_offset=offset)
            q, k = (torch.randn(BATCH, SEQ, heads, head_dim).to(dtype) for heads in (HEADS, KV_HEADS))
            for of_weights, add_one in itertools.product((dtype, torch.float32), (False, True)):
                norm = normal(head_dim, of_weights, add_one=add_one)
                made = norm.rotate(rotation_of(rope), q, k, layout="bshd")
                assert fused.pop() is (backend.FAST_PATH and not (dtype == torch.float64 and of_weights != dtype))
                for y, other, x in zip(made, separate(norm, rotation_of(rope), q, k), (q, k), strict=True):
                    assert (y.dtype, y.shape) == (dtype, x.shape)
                    assert same(y, other, best()), (i, of_weights, add_one)

    def test_by_the_oracle(self, dtype: torch.dtype, pairing: Any, fused: list[bool]) -> None:
        """The norm is rounded before the rotation, as in engines. The oracle rotates the rounded tensor."""
        torch.manual_seed(3)
        rope = Rope(head_dim=24, base=1e4, pairing=pairing, rotary_dim=16, rotary_offset=4)
        q, k = (torch.randn(BATCH, SEQ, heads, 24).to(dtype) for heads in (HEADS, KV_HEADS))
        norm, rotation = normal(24, dtype), rotation_of(rope)
        cos, sin = (table.double().numpy()[:, None] for table in (rotation.cos, rotation.sin))
        out = torch.finfo(dtype)
        for x, y, weight in zip(
            (q, k), norm.rotate(rotation, q, k, layout="bshd"), (norm.q_weight, norm.k_weight), strict=True
        ):
            exact = oracle.rms_norm(x.double().numpy(), weight.double().numpy(), EPS)
            rounded = torch.tensor(exact.astype(np.float64)).to(dtype).double().numpy()
            want, size = oracle.rotate_by_tables(rounded, cos, sin, pairing, 4)
            # The norm may round the other way, which affects both products. The roundings of the rotation are added.
            allowed = 2 * out.eps * size + out.eps * abs(want) + out.smallest_normal
            still = np.zeros(24, bool)
            still[:4] = still[20:] = True
            error = abs(y.double().numpy() - want)
            assert (error <= np.where(still, 2 * out.eps * abs(want), allowed)).all()

    def test_layouts_and_strides(self, dtype: torch.dtype, pairing: Any, fused: list[bool]) -> None:
        torch.manual_seed(4)
        rope, norm = Rope(head_dim=64, base=1e4, pairing=pairing, rotary_dim=32), normal(64, dtype)
        rotation = rotation_of(rope)
        for layout in LAYOUTS:
            q, k = (torch.randn(shape(layout, BATCH, SEQ, heads, 64)).to(dtype) for heads in (HEADS, KV_HEADS))
            check_same(norm, rotation, q, k, layout, fused)
        whole = torch.randn(BATCH, SEQ, (HEADS + 2 * KV_HEADS) * 64).to(dtype).unflatten(-1, (-1, 64))
        check_same(norm, rotation, whole[:, :, :HEADS], whole[:, :, HEADS : HEADS + KV_HEADS], "bshd", fused)
        apart = torch.randn(BATCH, SEQ, HEADS, 192).to(dtype)[..., ::3]
        check_same(norm, rotation, apart, apart[:, :, :1], "bshd", fused)
        one = torch.randn(1, 1, 1, 64).to(dtype).expand(BATCH, SEQ, HEADS, 64)
        check_same(norm, rotation, one, one[:, :, :1], "bshd", fused)
        check_same(norm, rope.at(torch.tensor([[1, 5, 9], [2, 2, 40]])), apart, apart[:, :, :1], "bshd", fused)


def best() -> str:
    return cpu.version() if backend.FAST_PATH else ""


def check_same(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor, layout: Any, fused: list[bool]) -> None:
    before = q.clone(), k.clone()
    made = norm.rotate(rotation, q, k, layout=layout)
    assert fused.pop() is backend.FAST_PATH
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    for y, other in zip(made, separate(norm, rotation, q, k, layout), strict=True):
        assert same(y, other, best())


class TestGradients:
    def given(self, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(5)
        q, k = (torch.randn(BATCH, SEQ, heads, 8).to(dtype).requires_grad_() for heads in (HEADS, KV_HEADS))
        return [q, k, *(w.requires_grad_() for w in weights(8, dtype))]

    def rotation(self, dtype: torch.dtype = torch.float32) -> Rotation:
        rope = Rope(head_dim=8, base=1e4, pairing="interleaved", rotary_dim=4, rotary_offset=2)
        return rope.at(torch.arange(SEQ), dtype=dtype)

    @pytest.mark.parametrize("add_one", [False, True])
    def test_by_finite_differences(self, add_one: bool) -> None:
        def call(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
            norm = QKNorm(of_q, of_k, 1e-2, add_one)
            return norm.rotate(self.rotation(torch.float64), q, k, layout="bshd")

        given = self.given(torch.float64)
        assert type(call(*given)[0].grad_fn).__name__ == "_NormAndRotateBackward"
        assert torch.autograd.gradcheck(call, given, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(call, given)

    @pytest.mark.parametrize("batch", [1, 2, 3])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_tables_of_each_head(self, layout: Any, batch: int) -> None:
        """Tables [heads, seq, pairs] that need no gradient, also for as many rows as heads."""
        torch.manual_seed(7)
        angle = torch.randn(2, SEQ, 2, dtype=torch.float64)
        rotation = Rotation(angle.cos(), angle.sin(), pairing="half", per_head=True)
        q, k = (torch.randn(shape(layout, batch, SEQ, 2, 4), dtype=torch.float64).requires_grad_() for _ in range(2))
        norms = [w.requires_grad_() for w in weights(4, torch.float64)]

        def call(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
            return QKNorm(of_q, of_k, 1e-2).rotate(rotation, q, k, layout=layout)

        assert type(call(q, k, *norms)[0].grad_fn).__name__ == "_NormAndRotateBackward"
        assert torch.autograd.gradcheck(call, [q, k, *norms])

    @pytest.mark.parametrize("add_one", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_by_the_oracle(self, dtype: torch.dtype, add_one: bool, fused: list[bool]) -> None:
        given, rotation = self.given(dtype), self.rotation()
        made = QKNorm(*given[2:], EPS, add_one).rotate(rotation, *given[:2], layout="bshd")
        assert fused == [backend.FAST_PATH]
        grads = [torch.randn_like(y) for y in made]
        found = torch.autograd.grad(made, given, grads)
        cos, sin = (table.double().numpy()[:, None] for table in (rotation.cos, rotation.sin))
        out = torch.finfo(dtype)
        for i, (x, weight, grad) in enumerate(zip(given[:2], given[2:], grads, strict=True)):
            back, _ = oracle.rotate_by_tables(grad.double().numpy(), cos, sin, "interleaved", 2, inverse=True)
            back = torch.tensor(back).to(dtype).double().numpy()  # the bound of the rotation alone
            x_, w_ = x.detach().double().numpy(), weight.detach().double().numpy()
            for got, want in zip(
                (found[i], found[2 + i]), oracle.rms_norm_gradient(x_, w_, back, EPS, add_one), strict=True
            ):
                assert got.dtype == dtype
                # Sums of up to 24 terms, each with the roundings of the norm and of the gradient before it.
                bound = 4 * out.eps * max(1.0, abs(want).max()) + (0 if dtype == torch.float32 else out.eps)
                assert (abs(got.double().numpy() - want) <= bound).all()

    def test_some_gradients(self) -> None:
        given = self.given(torch.float32)
        whole = torch.autograd.grad(self.sum(given), given)
        for i in range(4):
            alone = [x.detach().requires_grad_(i == j) for j, x in enumerate(given)]
            (found,) = torch.autograd.grad(self.sum(alone), [alone[i]])
            torch.testing.assert_close(found, whole[i], rtol=0, atol=0)
        q, _ = QKNorm(*given[2:], EPS).rotate(self.rotation(), *given[:2], layout="bshd")
        found = torch.autograd.grad(q.square().sum(), given, allow_unused=True)
        assert [x is None for x in found] == [False, True, False, True]

    def sum(self, given: list[Tensor]) -> Tensor:
        q, k = QKNorm(*given[2:], EPS).rotate(self.rotation(), *given[:2], layout="bshd")
        return (q.sin().sum() + k.cos().sum()).double()

    def test_learned_tables(self) -> None:
        """The gradient to learned tables needs the normalized tensor, so two calls are used."""
        given, plain = self.given(torch.float32), self.rotation()
        tables = [table.clone().requires_grad_() for table in (plain.cos, plain.sin)]
        rotation = Rotation(*tables, pairing="interleaved", head_dim=8, rotary_offset=2)
        norm = QKNorm(*given[2:], EPS)
        made, other = norm.rotate(rotation, *given[:2], layout="bshd"), separate(norm, rotation, *given[:2])
        for x, y in zip(
            *(torch.autograd.grad(sum(t.sin().sum() for t in o), [*given, *tables]) for o in (made, other)), strict=True
        ):
            assert torch.equal(x, y)


class Subclass(Tensor):
    pass


def compiled(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    done: tuple[Tensor, Tensor] = torch.compile(norm.rotate, backend="aot_eager", fullgraph=True)(
        rotation, q, k, layout="bshd"
    )
    return done


def mapped(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    done: tuple[Tensor, Tensor] = torch.func.vmap(lambda q, k: norm.rotate(rotation, q, k, layout="thd"))(q, k)
    return done


def profiled(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        done = norm.rotate(rotation, q, k, layout="bshd")
    assert not backend.FAST_PATH or "ropewalk::step" in {event.key for event in seen.key_averages()}
    return done


def under_autocast(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return norm.rotate(rotation, q, k, layout="bshd")


def of_a_subclass(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = norm.rotate(rotation, q.as_subclass(Subclass), k.as_subclass(Subclass), layout="bshd")
    assert type(q) is Subclass
    return q.as_subclass(Tensor), k.as_subclass(Tensor)


def in_a_mode(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    with torch.overrides.BaseTorchFunctionMode():
        return norm.rotate(rotation, q, k, layout="bshd")


def forwards(norm: QKNorm, rotation: Rotation, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        dual = norm.rotate(rotation, forward_ad.make_dual(q, torch.ones_like(q)), k, layout="bshd")
        return forward_ad.unpack_dual(dual[0]).primal, dual[1]


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    f.__name__: f for f in (compiled, mapped, profiled, under_autocast, of_a_subclass, in_a_mode, forwards)
}


@pytest.mark.skipif(backend.BACKEND == "kernel", reason="some of them have no kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_everywhere(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    rope, norm = Rope(head_dim=24, base=1e4, pairing="half", rotary_dim=16), normal(24, torch.float32)
    q, k = (torch.randn(BATCH, SEQ, heads, 24).to(dtype) for heads in (HEADS, KV_HEADS))
    usual = norm.rotate(rotation_of(rope), q, k, layout="bshd")
    for x, y in zip(WAYS[way](norm, rotation_of(rope), q, k), usual, strict=True):
        assert same(x, y, best())


@pytest.mark.skipif(backend.BACKEND == "kernel", reason="there is no kernel for meta tensors")
def test_meta() -> None:
    norm = QKNorm(*(w.to("meta") for w in weights(8, torch.float32)), EPS)
    rotation = Rope(head_dim=8, base=1e4, pairing="half").at(torch.arange(SEQ), device="meta")
    q, k = (torch.empty(BATCH, SEQ, heads, 8, device="meta") for heads in (HEADS, KV_HEADS))
    made = norm.rotate(rotation, q, k, layout="bshd")
    assert [(x.shape, x.device.type) for x in made] == [(q.shape, "meta"), (k.shape, "meta")]


def test_no_tokens() -> None:
    rotation, norm = rotation_of(Rope(head_dim=8, base=1e4, pairing="half"), 0), normal(8, torch.float32)
    assert norm.rotate(rotation, torch.ones(2, 0, 4, 8), torch.ones(2, 0, 2, 8), layout="bshd")[0].shape == (2, 0, 4, 8)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"q_weight": 1.0}, r"must be tensors \[head_dim\], float16, .*, got 1.0 and"),
        ({"q_weight": torch.ones(2, 4)}, r"must be tensors \[head_dim\]"),
        ({"q_weight": torch.ones(8, dtype=torch.int64)}, r"must be tensors \[head_dim\]"),
        ({"k_weight": torch.ones(4)}, "must have the same shape, dtype and device"),
        ({"k_weight": torch.ones(8).double()}, "must have the same shape, dtype and device"),
        ({"eps": 0.0}, "eps must be a finite number greater than 0, got 0.0"),
        ({"eps": True}, "eps must be a finite number"),
        ({"add_one": 1}, "add_one must be True or False, got 1"),
    ],
    ids=str,
)
def test_impossible_norms(how: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        QKNorm(**{"q_weight": torch.ones(8), "k_weight": torch.ones(8), "eps": 1e-6} | how)


@pytest.mark.parametrize("wanted", [False, True], ids=["", "with gradients"])
def test_invalid_arguments(wanted: bool) -> None:
    norm, rotation = normal(8, torch.float32), rotation_of(Rope(head_dim=8, base=1e4, pairing="half"))
    q, k = torch.ones(2, 3, 4, 8, requires_grad=wanted), torch.ones(2, 3, 2, 8)
    for other, message in (
        ((q[..., :6], k), r"q must be a tensor \[..., head_dim=8\] on cpu"),
        ((q, k[..., :6]), r"k must be a tensor"),
        ((q, [1]), "k must be a tensor"),
        ((q, k.long()), "k must be a tensor"),
        ((q, k.to("meta")), "k must be a tensor"),
        ((q[:, :2], k), "must have 3 tokens"),
    ):
        with pytest.raises(RopeError, match=message):
            norm.rotate(rotation, *other, layout="bshd")
    with pytest.raises(RopeError, match="layout must be one of"):
        norm.rotate(rotation, q, k, layout="shbd")
    with pytest.raises(RopeError, match="rotation must be a Rotation, got"):
        norm.rotate((rotation.cos, rotation.sin), q, k, layout="bshd")


def test_gradient_of_numbers_whose_squares_overflow() -> None:
    """1e20² overflows float32. The mean is computed in float64, in the forward and the backward pass."""
    q = torch.full((1, 1, 1, 16), 1e20, requires_grad=True)
    weight = torch.ones(16, requires_grad=True)
    norm = QKNorm(weight, torch.ones(16), eps=1e-6)
    rotation = Rope(16, 1e4, "half").at(torch.arange(1))
    rotated, _ = norm.rotate(rotation, q, torch.ones(1, 1, 1, 16), layout="bshd")
    rotated.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(16))
