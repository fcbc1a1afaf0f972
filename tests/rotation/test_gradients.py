"""Gradients of first and second order, in place, and to cos and sin, by finite differences and plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from ropewalk import Rope, RopeError, Rotation, YaRN
from ropewalk.rotation import reference

LAYOUTS = {"bshd": (2, 3, 2, 8), "bhsd": (2, 2, 3, 8), "sbhd": (3, 2, 2, 8), "thd": (3, 2, 8)}


def rope(pairing: str = "half") -> Rope:
    return Rope(8, 1e4, pairing, rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 64))


def double(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
class TestGradcheck:
    def rotation(self, pairing: str) -> Rotation:
        return rope(pairing).at(torch.tensor([5, 0, 100_000]), dtype=torch.float64)

    def test_new_tensors(self, layout: str, pairing: str) -> None:
        rotation, q, k = self.rotation(pairing), double(*LAYOUTS[layout]), double(*LAYOUTS[layout])
        function = lambda q, k: rotation(q, k, layout=layout)  # noqa: E731
        assert gradcheck(function, (q, k), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(function, (q, k))

    def test_new_tensors_of_a_whole_head(self, layout: str, pairing: str) -> None:
        rotation = Rope(8, 1e4, pairing).at(torch.tensor([5, 0, 100_000]), dtype=torch.float64)
        function = lambda q: rotation(q, layout=layout)  # noqa: E731
        q = double(*LAYOUTS[layout])
        assert gradcheck(function, q, check_forward_ad=True, check_batched_grad=True)
        jacobian = torch.autograd.functional.jacobian(function, q, vectorize=True)
        torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(function, q))

    def test_in_place(self, layout: str, pairing: str) -> None:
        rotation, q, k = self.rotation(pairing), double(*LAYOUTS[layout]), double(*LAYOUTS[layout])

        def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = q * 1, k * 1
            rotation.apply_(q, k, layout=layout)
            return q, k

        assert gradcheck(function, (q, k), check_forward_ad=True)
        assert gradgradcheck(function, (q, k))

    def test_to_cos_and_sin(self, layout: str, pairing: str) -> None:
        q = double(*LAYOUTS[layout])
        cos, sin = double(3, 2), double(3, 2)

        def function(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return Rotation(cos, sin, pairing=pairing, head_dim=8, rotary_offset=2)(q, layout=layout)

        assert gradcheck(function, (q, cos, sin), check_forward_ad=True)
        assert gradgradcheck(function, (q, cos, sin))

    def test_to_cos_and_sin_of_q_and_k(self, layout: str, pairing: str) -> None:
        def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            rotation = Rotation(cos, sin, pairing=pairing, head_dim=8, rotary_offset=2)
            # In one tensor, so that the gradients of q and k come together.
            return torch.cat([y.flatten() for y in rotation(q, k, layout=layout)])

        size = LAYOUTS[layout]
        assert gradcheck(function, (double(*size), double(*size), double(3, 2), double(3, 2)))

    def test_to_cos_and_sin_in_place(self, layout: str, pairing: str) -> None:
        cos, sin = double(3, 2), double(3, 2)

        def function(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q = q * 1
            Rotation(cos, sin, pairing=pairing, head_dim=8, rotary_offset=2).apply_(q, layout=layout)
            return q

        assert gradcheck(function, (double(*LAYOUTS[layout]), cos, sin))


def test_gradient_is_the_inverse_rotation() -> None:
    rotation = rope().at(torch.arange(3))
    q, grad = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 3, 2, 8)
    rotation(q, layout="bshd").backward(grad)
    # The transpose of a rotation times f is f² times its inverse on the rotated channels.
    factor = torch.ones(8)
    factor[2:6] = rotation.attention_factor**2
    torch.testing.assert_close(q.grad, rotation.inverse()(grad, layout="bshd") * factor)


def test_only_the_tables_are_saved() -> None:
    rotation = rope().at(torch.arange(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rotation(torch.randn(1, 3, 64, 8, requires_grad=True), layout="bshd")
    assert sum(t.untyped_storage().nbytes() for t in saved) <= 2 * rotation.cos.untyped_storage().nbytes()


def test_gradients_with_stride_zero() -> None:
    rotation, q = rope().at(torch.arange(3)), torch.randn(1, 3, 2, 8, requires_grad=True)
    rotation(q, layout="bshd").sum().backward()
    expected = torch.autograd.grad((rotation(q, layout="bshd") * torch.ones(1, 3, 2, 8)).sum(), q)[0]
    assert torch.equal(q.grad, expected)


def test_only_q_or_only_k_requires_a_gradient() -> None:
    rotation = rope().at(torch.arange(3))
    q, k = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 3, 1, 8)
    turned_q, turned_k = rotation(q, k, layout="bshd")
    assert turned_q.requires_grad
    assert not turned_k.requires_grad
    k.requires_grad_()
    rotation(q.detach(), k, layout="bshd")[1].sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    rotation = rope().at(torch.arange(3))
    q, grad = torch.randn(1, 3, 2, 8).to(dtype).requires_grad_(), torch.randn(1, 3, 2, 8).to(dtype)
    rotation(q, layout="bshd").backward(grad)
    wide = q.detach().float().requires_grad_()
    rotation(wide, layout="bshd").backward(grad.float())
    assert q.grad.dtype == dtype
    assert torch.equal(q.grad, wide.grad.to(dtype))


@pytest.mark.parametrize("learned", [False, True])
def test_gradient_of_a_table_used_by_many_tensors(learned: bool) -> None:
    """The gradient equals that of plain autograd through the reference, for every implementation."""
    cos, sin = torch.randn(3, 2, requires_grad=learned), torch.randn(3, 2, requires_grad=learned)
    q = torch.randn(2, 3, 4, 4, requires_grad=True)
    wanted = (q, cos, sin) if learned else (q,)
    mine = torch.autograd.grad(Rotation(cos, sin, pairing="half")(q, layout="bshd").square().sum(), wanted)
    plain = reference.rotate(q, cos[:, None], sin[:, None], pairing="half", rotary_offset=0)
    for a, b in zip(mine, torch.autograd.grad(plain.square().sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


class TestInPlaceOnAFusedProjection:
    """q and k are slices of one tensor, as after a fused QKV projection."""

    def loss(self, qkv: Tensor, rotation: Rotation, in_place: bool) -> Tensor:
        qkv = qkv * 1
        q, k, v = qkv[:, :, :4], qkv[:, :, 4:5], qkv[:, :, 5:]
        if in_place:
            rotation.apply_(q, k, layout="bshd")
        else:
            q, k = rotation(q, k, layout="bshd")
        return (q * k * v).square().sum()

    def test_is_the_same_as_new_tensors(self) -> None:
        rotation = rope().at(torch.arange(3))
        gradients = []
        for in_place in (True, False):
            qkv = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
            self.loss(qkv, rotation, in_place).backward()
            gradients.append(qkv.grad)
        torch.testing.assert_close(*gradients)

    def test_one_function_for_both_is_refused(self) -> None:
        """PyTorch refuses a naive autograd.Function that changes two views of one tensor."""

        class Both(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k):  # type: ignore[no-untyped-def]
                ctx.mark_dirty(q, k)
                return q.mul_(2), k.mul_(2)

            @staticmethod
            def backward(ctx, q, k):  # type: ignore[no-untyped-def]
                return 2 * q, 2 * k

        qkv = torch.randn(2, 3, 6, 8, requires_grad=True) * 1
        with pytest.raises(RuntimeError, match="cannot return more than one Tensor"):
            Both.apply(qkv[:, :, :4], qkv[:, :, 4:5])


def test_tables_of_inference_mode_are_refused_if_a_gradient_is_required() -> None:
    with torch.inference_mode():
        rotation = rope().at(torch.arange(3))
    assert rotation(torch.randn(1, 3, 2, 8), layout="bshd").shape == (1, 3, 2, 8)
    with pytest.raises(RopeError, match=r"tables created under torch\.inference_mode"):
        rotation(torch.randn(1, 3, 2, 8, requires_grad=True), layout="bshd")


def test_a_missing_gradient_stays_missing() -> None:
    q, k = double(3, 2, 8), double(3, 1, 8)
    rotation = rope().at(torch.tensor([5, 0, 9]), dtype=torch.float64)
    (d_q,) = torch.autograd.grad(rotation(q, k, layout="thd")[0].sum(), q, retain_graph=True)
    torch.testing.assert_close(d_q, torch.autograd.grad(rotation(q, layout="thd").sum(), q)[0])
    assert torch.autograd.grad(rotation(q, k, layout="thd")[0].sum(), k, allow_unused=True) == (None,)
