"""Inputs for tests of the kernels, and comparisons of their results with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from ropewalk._layout import Options
from ropewalk.rotation import reference

LAYOUTS = ["bshd", "bhsd", "sbhd", "thd"]
PAIRINGS = ["half", "interleaved"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# All checks of torch.library.opcheck.
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALLEST_NORMAL = torch.finfo(torch.bfloat16).smallest_normal


def shape(layout: str, batch: int, seq: int, heads: int, head_dim: int) -> tuple[int, ...]:
    size = {"b": batch, "s": seq, "t": seq, "h": heads, "d": head_dim}
    return tuple(size[axis] for axis in layout)


def bits(x: Tensor) -> Tensor:
    """Return the bits as integers, so that -0 differs from 0 and NaN equals itself."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def as_bshd(x: Tensor, layout: str) -> np.ndarray:
    """Return a tensor as float64 with the axes [batch, seq, heads, head_dim]."""
    array = x.detach().double().cpu().numpy()
    letters = layout.replace("t", "s")
    if "b" not in letters:
        array, letters = array[None], "b" + letters
    return array.transpose([letters.index(axis) for axis in "bshd"])


def broadcast(table: Tensor) -> np.ndarray:
    """Return a table, as in a Rotation or per head, in a shape that broadcasts to [batch, seq, heads, pairs]."""
    array = table.detach().double().cpu().numpy()
    if array.ndim == 4:
        return array.transpose(0, 2, 1, 3)
    return array if array.ndim == 1 else array[..., None, :]


def expected(
    x: Tensor, cos: Tensor, sin: Tensor, layout: str, pairing: str, offset: int, inverse: bool
) -> tuple[np.ndarray, np.ndarray]:
    return oracle.rotate_by_tables(as_bshd(x, layout), broadcast(cos), broadcast(sin), pairing, offset, inverse)


def check(
    y: Tensor,
    exact: np.ndarray,
    size: np.ndarray,
    layout: str,
    description: object,
    flushed: bool = False,
    truncated: bool = False,
) -> None:
    """Check that y is the exact value up to the documented roundings.

    The roundings are those of two products, one sum and a float64 table to float32, and then one to the dtype of y.
    The oracle rounds in float64 as well.

    Args:
        size: the sum of the magnitudes of the products.
        description: the case, for the message.
        flushed: whether subnormal bfloat16 numbers may be 0.
        truncated: whether y is truncated instead of rounded, as Triton's interpreter does with bfloat16.
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
    still = size == 0  # copied channels, or products that are all 0
    worst = np.unravel_index(np.argmax(np.where(error > allowed, error, 0)), error.shape) if error.size else ()
    assert (error <= np.where(still, smallest, allowed)).all(), (
        f"{description}: {(~(error <= allowed)).sum()} wrong, {as_bshd(y, layout)[worst]} for {exact[worst]} at {worst}"
    )


def by_reference(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: str, pairing: str, offset: int, inverse: bool
) -> list[Tensor]:
    return reference.rotate_in_layout(tensors, cos, sin, Options(layout, pairing == "interleaved", offset, inverse))


def same(x: Tensor, y: Tensor, level: str) -> bool:
    """Return whether x and y have the same bits, except for payloads of NaN.

    AVX512-BF16 may flush subnormal bfloat16 numbers to 0.
    """
    x, y = x.detach(), y.detach()
    equal = (bits(x) == bits(y)) | (x.isnan() & y.isnan())
    if level == "avx512_bf16" and x.dtype == torch.bfloat16:
        equal |= (x.float() - y.float()).abs() <= SMALLEST_NORMAL
    return bool(equal.all())


def same_in_8_bits(kept: Tensor, scales: Tensor, x: Tensor) -> bool:
    """Return whether heads x `[..., head_dim]` are kept as the oracle quantizes them, except for the sign of NaN."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    numbers, of_heads = oracle.quantized(wide.numpy(), "int8" if kept.dtype == torch.int8 else "fp8")
    pairs = ((kept.float(), torch.from_numpy(numbers)), (scales, torch.from_numpy(of_heads)))
    return all(bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all()) for a, b in pairs)


def unchanged(x: Tensor, before: Tensor) -> bool:
    return torch.equal(bits(x), bits(before))


def check_rotation(
    kernel: Any,
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: str,
    pairing: str,
    offset: int = 0,
    inverse: bool = False,
    like: Callable[[Tensor], Tensor] = torch.empty_like,
    *,
    level: str = "",
    truncated: bool = False,
) -> list[Tensor]:
    """Rotate with a kernel, into outputs full of NaN. Compare with the oracle and the reference."""
    before = [x.clone() for x in tensors]
    outputs = [like(x).fill_(math.nan) for x in tensors]
    kernel.rotate(tensors, outputs, cos, sin, Options(layout, pairing == "interleaved", offset, inverse))
    flushed = level == "avx512_bf16" and tensors[0].dtype == torch.bfloat16
    shapes = [tuple(x.shape) for x in tensors]
    description = f"{shapes}, tables {tuple(cos.shape)} {cos.dtype}, offset {offset}, inverse {inverse}"
    plain = by_reference(tensors, cos, sin, layout, pairing, offset, inverse)
    for x, y, other, old in zip(tensors, outputs, plain, before, strict=True):
        check(y, *expected(x, cos, sin, layout, pairing, offset, inverse), layout, description, flushed, truncated)
        assert truncated or same(y, other, level), description
        outside = torch.ones(x.shape[-1], dtype=torch.bool)
        outside[offset : offset + 2 * cos.shape[-1]] = False
        assert unchanged(y[..., outside], x[..., outside]), description
        assert unchanged(x, old), description
    return outputs


def check_table_gradient(
    kernel: Any,
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    layout: str,
    pairing: str,
    offset: int,
    *,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients to cos and sin with a kernel, and compare them with the sums of the oracle."""
    before = [x.clone() for x in (*tensors, *grads)]
    made: tuple[Tensor, Tensor] = kernel.table_gradient(
        tensors, grads, pairs, Options(layout, pairing == "interleaved", offset), per_head
    )
    rows = [[as_bshd(y, layout) for y in pair] for pair in zip(tensors, grads, strict=True)]
    if per_head:  # one head at a time, because the oracle sums over heads
        rows = [[y[..., None, :] for y in pair] for pair in rows]
    parts = [oracle.table_gradient(*pair, pairs, pairing, offset) for pair in rows]
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    # Each head adds two roundings of products and two of sums; the oracle rounds in float64 as well.
    heads = len(parts) if per_head else sum(x.shape[layout.index("h")] for x in tensors)
    allowed = (4 * heads + 4) * torch.finfo(dtype).eps * sum(part[2] for part in parts) / 2 + torch.finfo(dtype).tiny
    for table, name, which in zip(made, ("cos", "sin"), (0, 1), strict=True):
        exact, most = (
            x.transpose(0, 2, 1, 3) if per_head else x for x in (sum(part[which] for part in parts), allowed)
        )
        assert table.dtype == dtype
        assert table.shape == exact.shape
        assert (abs(table.double().cpu().numpy() - exact) <= most).all(), f"{name} {pairs} {offset}"
    assert all(unchanged(x, old) for x, old in zip((*tensors, *grads), before, strict=True))
    return made


def record_calls(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each later call of a kernel of this module, `cpu` or `gpu`, appends its name."""
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
