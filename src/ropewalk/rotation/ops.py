"""Gradients: the gradient of a rotation is the rotation back, so only the tables are saved.

PyTorch would find the same gradient by itself through `reference.rotate`, and does wherever something else than eager
reverse mode asks: an autograd.Function gives no gradient, or a wrong one, in silence under torch.func transforms,
forward-mode AD, torch.compile(torch.func.grad(f)) and export (tests/rotation/test_transforms.py shows each).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropewalk.rotation import checks, reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, pairing: str, rotary_offset: int) -> Tensor:
    """`reference.rotate`, differentiable by rotating back where that is right and cheaper."""
    if _plain_autograd_is_needed(cos, sin) or not (torch.is_grad_enabled() and x.requires_grad):
        return reference.rotate(x, cos, sin, pairing=pairing, rotary_offset=rotary_offset)
    checks.can_be_saved(cos)
    turned: Tensor = _Rotate.apply(x, cos, sin, pairing, rotary_offset)  # type: ignore[no-untyped-call]
    return turned


def _plain_autograd_is_needed(cos: Tensor, sin: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or cos.requires_grad
        or sin.requires_grad
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairing: str, rotary_offset: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.pairing, ctx.rotary_offset = pairing, rotary_offset
        return reference.rotate(x, cos, sin, pairing=pairing, rotary_offset=rotary_offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None
        cos, sin = ctx.saved_tensors
        back = rotate(grad, cos, -sin, pairing=ctx.pairing, rotary_offset=ctx.rotary_offset)
        return back, None, None, None, None
