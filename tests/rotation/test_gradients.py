"""Gradients of first and second order, in place, and to cos and sin, by finite differences and plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from ropewalk import Rope, RopeError, Rotation, YaRN

LAYOUTS = {"bshd": (2, 3, 2, 8), "bhsd": (2, 2, 3, 8), "sbhd": (3, 2, 2, 8), "thd": (3, 2, 8)}


def rope(pairing: str = "half") -> Rope:
    return Rope(8, 1e4, pairing, rotary_dim=4, rotary_offset=2, scaling=YaRN(4, 64))


def double(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("layout", "pairing"), [("bshd", "half"), ("bhsd", "interleaved"), ("sbhd", "half"), ("thd", "interleaved")]
)
class TestGradcheck:
    def rotation(self, pairing: str) -> Rotation:
        return rope(pairing).at(torch.tensor([5, 0, 100_000]), dtype=torch.float64)

    def test_new_tensors(self, layout: str, pairing: str) -> None:
        rotation, q, k = self.rotation(pairing), double(*LAYOUTS[layout]), double(*LAYOUTS[layout])
        function = lambda q, k: rotation(q, k, layout=layout)  # noqa: E731
        assert gradcheck(function, (q, k), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(function, (q, k))

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


def test_only_the_tables_are_saved() -> None:
    rotation = rope().at(torch.arange(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rotation(torch.randn(1, 3, 64, 8, requires_grad=True), layout="bshd")
    assert sum(t.untyped_storage().nbytes() for t in saved) <= 2 * rotation.cos.untyped_storage().nbytes()


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


def test_tables_of_inference_mode_are_refused_if_a_gradient_is_required() -> None:
    with torch.inference_mode():
        rotation = rope().at(torch.arange(3))
    assert rotation(torch.randn(1, 3, 2, 8), layout="bshd").shape == (1, 3, 2, 8)
    with pytest.raises(RopeError, match=r"tables created under torch\.inference_mode"):
        rotation(torch.randn(1, 3, 2, 8, requires_grad=True), layout="bshd")
