"""Check that tensors can be rotated in place: no two elements share memory, and autograd allows the change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk._checks import error
from ropewalk.kernels.backend import PLAIN

_WHO = "Rotation.apply_"


def check_elements(who: str, x: Tensor, fix: str) -> None:
    """Raise unless x has memory for each element, and is not a tensor of inference mode outside of it."""
    if not x.is_contiguous() and overlaps_itself(x):
        got = f"strides {x.stride()} of shape {tuple(x.shape)}"
        raise error(who, "each element must have memory of its own", got, fix)
    if torch.compiler.is_compiling():  # which cannot trace the other two; PyTorch then refuses such tensors itself
        return
    if x.is_inference() and not torch.is_inference_mode_enabled():
        must = "outside inference mode, each tensor must be an ordinary tensor"
        raise error(who, must, "one created under torch.inference_mode()", fix)
    if x._is_zerotensor():
        raise error(who, "each element must have memory", "a zero tensor of PyTorch", fix)
    check_memory(who, x)


def overlaps_itself(x: Tensor) -> bool:
    """Return whether two elements of x share memory. Return True if that would take too long to find out."""
    axes = [(stride, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    if torch.compiler.is_compiling():  # sizes may be symbols, which cannot be sorted
        return any(stride == 0 for stride, _ in axes)
    axes.sort()
    while axes and axes[-1][0] > sum(stride * (n - 1) for stride, n in axes[:-1]):
        axes.pop()  # strides are nested: a step along this axis is longer than all other axes together
    count = math.prod(n for _, n in axes)
    if not axes or not x.numel() or count > 2**20:
        return bool(axes) and x.numel() > 0
    offsets = np.zeros(1, np.int64)
    for stride, n in axes:
        offsets = np.add.outer(offsets, stride * np.arange(n)).ravel()
    return len(np.unique(offsets)) < count


def check_writable(tensors: list[Tensor], *, recorded: bool) -> None:
    """Raise if q or k cannot be rotated in place.

    Args:
        tensors: q, or q and k.
        recorded: whether autograd records the change.
    """
    for x in tensors:
        check_elements(_WHO, x, "Call the rotation, which returns a new tensor, or clone it first.")
        if recorded:
            _check_recordable(x)
    if len(tensors) == 2 and share_elements(*tensors):
        raise error(
            _WHO,
            "q and k must not share elements",
            "tensors that overlap in memory",
            "Shared elements would be rotated twice. Call the rotation, which returns new tensors.",
        )


def check_memory(who: str, *tensors: Tensor) -> None:
    """Raise if the storage of a tensor was resized to 0, as by FSDP. PyTorch's own operators would read address 0."""
    for x in tensors if not torch.compiler.is_compiling() else ():
        if type(x) not in PLAIN or x.is_meta or x.layout is not torch.strided or _is_wrapped(x) or x._is_zerotensor():
            continue
        if x.numel() and not x.data_ptr():
            must, got = "each tensor must have memory", "one whose storage was resized to 0"
            raise error(who, must, got, "Restore its storage first.")


def _check_recordable(x: Tensor) -> None:
    """Raise if autograd cannot record a change of x. Autograd itself would raise only after q has been changed."""
    base = x._base if x._is_view() else x
    if base is not None and base.is_leaf and base.requires_grad:
        raise error(
            _WHO,
            "a tensor whose gradient is recorded must not be a leaf or a view of one",
            "a leaf that requires a gradient",
            "Call the rotation, which returns a new tensor, or rotate under torch.no_grad().",
        )
    if x._is_view() and _creation_meta(x).name != "DEFAULT":
        raise error(
            _WHO,
            "PyTorch must be able to record a change of the tensor",
            "a view created by unbind, split or chunk, under torch.no_grad(), or in inference mode",
            "Take the view by indexing while gradients are recorded, or call the rotation for a new tensor.",
        )


# How a view was created decides whether it may be changed in place. PyTorch has no public way to ask.
_creation_meta: Any = torch._C._autograd._get_creation_meta
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


def share_elements(q: Tensor, k: Tensor) -> bool:
    """Return whether q and k have elements in common. Return True if that would take too long to find out."""
    if q is k:
        return True
    if type(q) not in PLAIN or type(k) not in PLAIN or q.is_meta or _is_wrapped(q) or _is_wrapped(k):
        return False
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr() or not q.numel() or not k.numel():
        return False
    low, high = (q, k) if q.data_ptr() <= k.data_ptr() else (k, q)
    last = sum((n - 1) * stride for n, stride in zip(low.shape, low.stride(), strict=True))
    if high.data_ptr() >= low.data_ptr() + (last + 1) * low.element_size():
        return False  # disjoint ranges, as in one token of a fused projection
    try:
        # NumPy's stubs know only two values of max_work; this one bounds the time.
        return np.shares_memory(np.asarray(_Addresses(q)), np.asarray(_Addresses(k)), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # they may share elements


class _Addresses:
    """The addresses of a tensor's elements, for NumPy. Works for any dtype and device, since nothing is read."""

    __slots__ = ("__array_interface__",)

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(size * stride for stride in x.stride()),
            "typestr": f"|V{size}",
        }
