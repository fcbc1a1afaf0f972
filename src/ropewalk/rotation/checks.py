"""Does a tensor fit the tables? Every check of a rotation's arguments, and its message."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk._checks import choice, described, error, shown
from ropewalk._dtensor import is_dtensor
from ropewalk._layout import AXES, Layout
from ropewalk.kernels.backend import PLAIN

_TABLE_DTYPES = (torch.float32, torch.float64)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AXES_SHARED, _AXES_PER_HEAD = (1, 2, 3), (3, 4)
_WHO, _WHO_IN_PLACE, _WHO_OPERATOR = "Rotation", "Rotation.apply_", "torch.ops.ropewalk"


def tables(cos: Tensor, sin: Tensor, rotary_dim: int | None = None, *, per_head: bool = False) -> None:
    """Raise unless cos and sin are half-width tables of `rotary_dim` channels, in a dtype that holds an angle."""
    for table in (cos, sin):
        if not isinstance(table, Tensor):
            raise error(_WHO, "cos and sin must be tensors", shown(table), "Make them with Rope.at(positions).")
    if cos.dtype != sin.dtype or cos.dtype not in _TABLE_DTYPES:
        raise error(
            _WHO,
            "cos and sin must both be float32 or float64",
            f"{cos.dtype} and {sin.dtype}",
            "Something cast them: .half() or .bfloat16() on a container, or the mixed precision of FSDP or DeepSpeed. "
            "Hand the Rotation over as it is.",
        )
    if cos.shape != sin.shape or cos.ndim not in (_AXES_PER_HEAD if per_head else _AXES_SHARED) or cos.shape[-1] < 1:
        shapes = "[heads, seq, pairs] or [batch, heads, seq, pairs]"
        must = f"with per_head=True, cos and sin must have the same shape {shapes}"
        raise error(
            _WHO,
            must if per_head else "cos and sin must have the same shape [seq, pairs], [batch, seq, pairs] or [pairs]",
            f"shapes {tuple(cos.shape)} and {tuple(sin.shape)}",
            "Half width: one column for each pair, not one for each channel."
            + ("" if per_head else f" For tables of each head, {shapes}, pass per_head=True."),
        )
    if rotary_dim is not None and 2 * cos.shape[-1] != rotary_dim:
        raise error(
            _WHO,
            f"cos and sin must have {rotary_dim // 2} columns, one for each pair of rotary_dim={rotary_dim}",
            f"shape {tuple(cos.shape)}",
            "Something changed the tables of a Rotation, such as tree_map. Make a new one with Rope.at(positions).",
        )
    if cos.layout is not torch.strided or sin.layout is not torch.strided:
        raise error(_WHO, "cos and sin must be dense tensors", f"{cos.layout} and {sin.layout}", "Make them dense.")
    if cos.device != sin.device:
        raise error(_WHO, "cos and sin must be on the same device", f"{cos.device} and {sin.device}", "Move one.")


def tensors_fit(
    tensors: list[Tensor],
    layout: Layout,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotary_dim: int,
    *,
    per_head: bool = False,
) -> None:
    """Raise unless q, and k if there is one, have the axes that `layout` says and the sizes of the tables.

    A quick look at what is nearly always so; only where it is not, each check by itself with its message.
    """
    if per_head or not _plainly_fit(tensors, layout, cos, sin, head_dim, rotary_dim):
        for name, x in zip(("q", "k"), tensors, strict=False):
            tensor_fits(name, x, layout, cos, sin, head_dim, rotary_dim, per_head=per_head)


def _plainly_fit(
    tensors: list[Tensor], layout: Layout, cos: Tensor, sin: Tensor, head_dim: int, rotary_dim: int
) -> bool:
    axes = AXES.get(layout) if isinstance(layout, str) else None
    if axes is None or not isinstance(cos, Tensor) or not isinstance(sin, Tensor):
        return False
    table = cos.shape
    if cos.dtype not in _TABLE_DTYPES or sin.dtype != cos.dtype or sin.shape != table:
        return False
    if not 2 <= len(table) <= 3 or 2 * table[-1] != rotary_dim:
        return False
    if cos.layout is not torch.strided or sin.layout is not torch.strided:
        return False
    batch, tokens, _, count = axes
    for x in tensors:
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or x.dtype not in _DTYPES:
            return False
        shape = x.shape
        if len(shape) != count or shape[-1] != head_dim or shape[tokens] != table[-2]:
            return False
        if len(table) == 3 and (batch is None or table[0] != shape[batch]):
            return False
        if not (x.is_cpu and cos.is_cpu and sin.is_cpu) and not (x.device == cos.device == sin.device):
            return False
    return True


def tensor_fits(
    name: str,
    x: Tensor,
    layout: Layout,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotary_dim: int | None = None,
    *,
    per_head: bool = False,
) -> None:
    """Raise unless x, called `name`, has the axes that `layout` says and the sizes of the tables."""
    choice(_WHO, "layout", layout, AXES)
    tables(cos, sin, rotary_dim, per_head=per_head)
    if not isinstance(x, Tensor):
        raise error(_WHO, f"{name} must be a tensor", shown(x), "Pass queries or keys.")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else str(x.layout)
        raise error(_WHO, f"{name} must be a dense tensor", kind, "Make it dense; for ragged batches see positions.")
    if x.dtype not in _DTYPES:
        raise error(_WHO, f"{name} must be float16, bfloat16, float32 or float64", str(x.dtype), "Convert it first.")
    *_, count = AXES[layout]
    if x.ndim != count:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {count} axes",
            f"shape {tuple(x.shape)}",
            "Pass the layout that it has.",
        )
    if x.shape[-1] != head_dim:
        raise error(
            _WHO,
            f"{name} must have head_dim={head_dim} as its last axis",
            f"shape {tuple(x.shape)}",
            "For the rotated slice alone, dataclasses.replace(rope, head_dim=rope.rotary_dim, rotary_offset=0).",
        )
    if per_head:
        _heads_fit(name, x, layout, cos)
    _tokens_fit(name, x, layout, cos, axes_without_batch=3 if per_head else 2)
    if x.device != cos.device:
        raise error(
            _WHO,
            f"{name} must be on {cos.device}, where cos and sin are",
            str(x.device),
            "Move the rotation with .to(device), or make it there: rope.at(positions, device=q.device).",
        )


def operator_fits(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, rotary_offset: int, *, in_place: bool
) -> None:
    """Raise unless an operator of `ops` was given what a `Rotation` would give it."""
    if not 1 <= len(tensors) <= 2:
        raise error(_WHO_OPERATOR, "tensors must be q, or q and k", f"{len(tensors)} tensors", "Use a Rotation.")
    # Of four axes, the first is there also where tables have no batch.
    of_cos, of_sin = (table[0] if table.ndim == 4 and table.shape[0] == 1 else table for table in (cos, sin))
    for name, x in zip(("q", "k"), tensors, strict=False):
        head_dim = tensors[0].shape[-1] if tensors[0].ndim else 0
        tensor_fits(name, x, layout, of_cos, of_sin, head_dim, per_head=cos.ndim == 4)
        if rotary_offset < 0 or rotary_offset + 2 * cos.shape[-1] > head_dim:
            raise error(
                _WHO_OPERATOR,
                f"the rotated channels must lie inside head_dim={head_dim}",
                f"{2 * cos.shape[-1]} from rotary_offset={rotary_offset} on",
                "Use a Rotation.",
            )
    q, k = tensors[0], tensors[-1]
    if not can_share_a_call(q, k, layout):
        raise error(
            _WHO_OPERATOR,
            "q and k must have the same dtype, batch, tokens and requires_grad",
            f"{described(q)} and {described(k)}",
            "Call it for each of them.",
        )
    if in_place:
        can_be_written(tensors, recorded=False)


def all_meta(tensors: list[Tensor]) -> None:
    """Raise if an operator was given tensors of the meta device beside others."""
    if not all(x.is_meta for x in tensors):
        devices = ", ".join(sorted({str(x.device) for x in tensors}))
        raise error(_WHO_OPERATOR, "all tensors must be on the same device", devices, "Use a Rotation.")


def can_share_a_call(q: Tensor, k: Tensor, layout: Layout) -> bool:
    """Whether one call of a kernel can do q and k, which have the same layout and head_dim."""
    of_q, of_k, (batch, tokens, _, _) = q.shape, k.shape, AXES[layout]
    return (
        q.dtype == k.dtype
        and q.requires_grad == k.requires_grad
        and of_q[tokens] == of_k[tokens]
        and (batch is None or of_q[batch] == of_k[batch])
    )


def can_be_written(tensors: list[Tensor], *, recorded: bool) -> None:
    """Raise if q, or k, cannot be rotated in place; `recorded`: for gradients."""
    for x in tensors:
        if not x.is_contiguous() and any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
            raise error(
                _WHO_IN_PLACE,
                "each element must have memory of its own",
                f"strides {x.stride()} of shape {tuple(x.shape)}",
                "Call the rotation for a new tensor, or expand after rotating.",
            )
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise error(
                _WHO_IN_PLACE,
                "outside inference mode an ordinary tensor is needed",
                "one made under torch.inference_mode()",
                "Call the rotation for a new tensor, or clone it first.",
            )
        if x._is_zerotensor():
            raise error(_WHO_IN_PLACE, "each element must have memory", "a zero tensor of PyTorch", "Clone it first.")
        if recorded:
            _can_be_recorded(x)
    if len(tensors) == 2 and share_elements(*tensors):
        raise error(
            _WHO_IN_PLACE,
            "q and k must not share elements",
            "tensors that overlap in memory",
            "Elements that belong to both would be rotated twice. Call the rotation for new tensors.",
        )


def have_memory(tensors: list[Tensor]) -> None:
    """Raise if the storage of a tensor was resized to nothing, which the kernels find only one call after the other."""
    for x in tensors:
        if x.numel() and not x.data_ptr():
            must, came = "a tensor must have memory", "one whose storage was resized to 0"
            raise error(_WHO_IN_PLACE, must, came, "Give it its storage back first.")


def _can_be_recorded(x: Tensor) -> None:
    """Raise if autograd would refuse to record a change of x, perhaps after the other tensor was changed."""
    base = x._base if x._is_view() else x
    if base is not None and base.is_leaf and base.requires_grad:
        raise error(
            _WHO_IN_PLACE,
            "a tensor whose gradient is recorded must not be a leaf, or a view of one",
            "a leaf that requires a gradient",
            "Call the rotation for a new tensor, or rotate under torch.no_grad().",
        )
    if x._is_view() and _creation_meta(x).name != "DEFAULT":
        raise error(
            _WHO_IN_PLACE,
            "PyTorch must be able to record a change of the tensor",
            "a view that was made by unbind, split or chunk, under torch.no_grad(), or in inference mode",
            "Take the view by indexing where gradients are recorded, or call the rotation for a new tensor.",
        )


# How a view was made decides whether it may be changed in place; PyTorch shows it nowhere else.
_creation_meta: Any = torch._C._autograd._get_creation_meta


def can_be_saved(cos: Tensor) -> None:
    """Raise if the tables cannot be kept for the backward pass."""
    if cos.is_inference():
        raise error(
            _WHO,
            "a gradient is wanted, so cos and sin must be ordinary tensors",
            "tables made under torch.inference_mode()",
            "Call rope.at(positions) outside inference mode.",
        )


def _heads_fit(name: str, x: Tensor, layout: Layout, cos: Tensor) -> None:
    heads = x.shape[AXES[layout][2]]
    if heads != cos.shape[-3]:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {cos.shape[-3]} heads, since cos and sin are tables of each head",
            f"{heads} in shape {tuple(x.shape)}",
            "Is the layout right? Where q and k differ in heads (GQA), rotate each by a Rotation of its own.",
        )


def _tokens_fit(name: str, x: Tensor, layout: Layout, cos: Tensor, axes_without_batch: int) -> None:
    if cos.ndim == 1:
        return
    at_batch, at_tokens, *_ = AXES[layout]
    seq = x.shape[at_tokens]
    if seq != cos.shape[-2]:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {cos.shape[-2]} tokens, one for each position",
            f"{seq} in shape {tuple(x.shape)}",
            "Is the layout right, and are these the positions of these tokens?",
        )
    if cos.ndim == axes_without_batch:
        return
    if at_batch is None:
        raise error(
            _WHO,
            f"layout {layout!r} has no batch axis and needs positions [tokens]",
            f"tables of shape {tuple(cos.shape)}",
            "Flatten the positions, or pass tensors with their batch axis.",
        )
    batch = x.shape[at_batch]
    if cos.shape[0] != 1 and cos.shape[0] != batch:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have batch size {cos.shape[0]}, that of the positions",
            f"{batch} in shape {tuple(x.shape)}",
            "Is the layout right?",
        )


def share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether two plain tensors have an element in common."""
    if q is k:
        return True
    if is_dtensor(q) and is_dtensor(k):
        q, k = q._local_tensor, k._local_tensor
    if type(q) not in PLAIN or type(k) not in PLAIN or q.is_meta or torch._C._are_functorch_transforms_active():
        return False
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr() or not q.numel() or not k.numel():
        return False
    low, high = (q, k) if q.data_ptr() <= k.data_ptr() else (k, q)
    last = sum((n - 1) * stride for n, stride in zip(low.shape, low.stride(), strict=True))
    if high.data_ptr() >= low.data_ptr() + (last + 1) * low.element_size():
        return False  # one after the other: one token of a fused projection
    try:
        # NumPy's stubs know only two values of max_work; this one bounds the time.
        return np.shares_memory(np.asarray(_Addresses(q)), np.asarray(_Addresses(k)), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # it could not be ruled out


class _Addresses:
    """The addresses of a tensor's elements, of any dtype and on any device, as NumPy wants them. Nothing is read."""

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
