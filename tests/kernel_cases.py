"""Inputs for tests of the kernels, and the allowed distance from the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from ropewalk.rotation import reference

LAYOUTS = ["bshd", "bhsd", "sbhd", "thd"]
PAIRINGS = ["half", "interleaved"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALLEST_NORMAL = torch.finfo(torch.bfloat16).smallest_normal


def shape(layout: str, batch: int, seq: int, heads: int, head_dim: int) -> tuple[int, ...]:
    size = {"b": batch, "s": seq, "t": seq, "h": heads, "d": head_dim}
    return tuple(size[axis] for axis in layout)


def bits(x: Tensor) -> Tensor:
    """The bits as integers: tells -0 from 0, and nan is equal to itself."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def as_bshd(x: Tensor, layout: str) -> np.ndarray:
    """A tensor in float64 and one order of axes."""
    array = x.detach().double().cpu().numpy()
    letters = layout.replace("t", "s")
    if "b" not in letters:
        array, letters = array[None], "b" + letters
    return array.transpose([letters.index(axis) for axis in "bshd"])


def broadcast(table: Tensor) -> np.ndarray:
    """A table against [batch, seq, heads, pairs]: as a Rotation has it, or per head [batch, heads, seq, pairs]."""
    array = table.detach().double().cpu().numpy()
    if array.ndim == 4:
        return array.transpose(0, 2, 1, 3)
    return array if array.ndim == 1 else array[..., None, :]


def expected(
    x: Tensor, cos: Tensor, sin: Tensor, layout: str, pairing: str, offset: int, inverse: bool
) -> tuple[np.ndarray, np.ndarray]:
    return oracle.turned(as_bshd(x, layout), broadcast(cos), broadcast(sin), pairing, offset, inverse)


def check(
    y: Tensor,
    exact: np.ndarray,
    size: np.ndarray,
    layout: str,
    says: object,
    flushed: bool = False,
    truncated: bool = False,
) -> None:
    """y is the exact value, but for the roundings that are promised.

    Two products, one sum and a float64 table to float32 (`size` is the sum of the products' sizes, and float64 rounds
    in the oracle as well); then one rounding to the dtype of y. `flushed`: bfloat16 below the normal numbers may be 0.
    `truncated`: it is cut off instead of rounded, as Triton's interpreter does with bfloat16.
    """
    unit = torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps / 2
    out = torch.finfo(y.dtype)
    smallest = SMALLEST_NORMAL if flushed else out.smallest_normal * out.eps
    allowed = (
        (10 if y.dtype == torch.float64 else 5) * unit * size
        + out.eps * (1 if truncated else 0.5) * abs(exact)
        + smallest
    )
    error = abs(as_bshd(y, layout) - exact)
    still = size == 0  # copied, or turned to 0
    worst = np.unravel_index(np.argmax(np.where(error > allowed, error, 0)), error.shape) if error.size else ()
    assert (error <= np.where(still, smallest, allowed)).all(), (
        f"{says}: {(~(error <= allowed)).sum()} wrong, {as_bshd(y, layout)[worst]} for {exact[worst]} at {worst}"
    )


def by_reference(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: str, pairing: str, offset: int, inverse: bool
) -> list[Tensor]:
    return reference.rotate_in_layout(
        tensors, cos, sin, layout=layout, pairing=pairing, rotary_offset=offset, inverse=inverse
    )


def same(x: Tensor, y: Tensor, level: str) -> bool:
    """Bit for bit, but for the payload of a nan; AVX512-BF16 may make 0 of bfloat16 below the normal numbers."""
    x, y = x.detach(), y.detach()
    equal = (bits(x) == bits(y)) | (x.isnan() & y.isnan())
    if level == "avx512_bf16" and x.dtype == torch.bfloat16:
        equal |= (x.float() - y.float()).abs() <= SMALLEST_NORMAL
    return bool(equal.all())


def unchanged(x: Tensor, before: Tensor) -> bool:
    return torch.equal(bits(x), bits(before))


def turned(
    kernel: Any,
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: str,
    pairing: str,
    offset: int,
    inverse: bool,
    like: Callable[[Tensor], Tensor],
    *,
    level: str = "",
    truncated: bool = False,
) -> list[Tensor]:
    """By the kernel, into outputs full of nan; checked against the oracle and the reference, inputs untouched."""
    before = [x.clone() for x in tensors]
    outputs = [like(x).fill_(math.nan) for x in tensors]
    kernel.rotate(tensors, outputs, cos, sin, layout, pairing == "interleaved", offset, inverse)
    flushed = level == "avx512_bf16" and tensors[0].dtype == torch.bfloat16
    shapes = [tuple(x.shape) for x in tensors]
    says = f"{shapes}, tables {tuple(cos.shape)} {cos.dtype}, offset {offset}, inverse {inverse}"
    plain = by_reference(tensors, cos, sin, layout, pairing, offset, inverse)
    for x, y, other, old in zip(tensors, outputs, plain, before, strict=True):
        check(y, *expected(x, cos, sin, layout, pairing, offset, inverse), layout, says, flushed, truncated)
        assert truncated or same(y, other, level), says
        outside = torch.ones(x.shape[-1], dtype=torch.bool)
        outside[offset : offset + 2 * cos.shape[-1]] = False
        assert unchanged(y[..., outside], x[..., outside]), says
        assert unchanged(x, old), says
    return outputs


def watched(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels of a module, `cpu` or `gpu`, that are called from now on."""
    names: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            done = function(*args)
            if done is not None or not name.endswith("_plain"):
                names.append(name.removesuffix("_plain"))
            return done

        return call

    for name in ("rotate", "table_gradient", "angles", "rotate_plain", "angles_plain"):
        if hasattr(kernels, name):
            monkeypatch.setattr(kernels, name, noted(name, getattr(kernels, name)))
    return names
