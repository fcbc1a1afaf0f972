"""Check the arguments of a rotation: cos and sin, the tensors to rotate, and the arguments of the private operators."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._checks import choice, describe, error, shown
from ropewalk._layout import AXES, Layout
from ropewalk.rotation import writable

_TABLE_DTYPES = (torch.float32, torch.float64)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AXES_SHARED, _AXES_PER_HEAD = (1, 2, 3), (3, 4)
_WHO, _WHO_OPERATOR = "Rotation", "torch.ops.ropewalk"


def check_tables(cos: Tensor, sin: Tensor, rotary_dim: int | None = None, *, per_head: bool = False) -> None:
    """Raise unless cos and sin are float32 or float64 tables with one column for each pair of `rotary_dim` channels."""
    for table in (cos, sin):
        if not isinstance(table, Tensor):
            raise error(_WHO, "cos and sin must be tensors", shown(table), "Make them with Rope.at(positions).")
    if cos.dtype != sin.dtype or cos.dtype not in _TABLE_DTYPES:
        raise error(
            _WHO,
            "cos and sin must both be float32 or float64",
            f"{cos.dtype} and {sin.dtype}",
            "Something cast them: .half() or .bfloat16() on a container, or the mixed precision of FSDP or DeepSpeed. "
            "Pass the Rotation without casting it.",
        )
    if cos.shape != sin.shape or cos.ndim not in (_AXES_PER_HEAD if per_head else _AXES_SHARED) or cos.shape[-1] < 1:
        shapes = "[heads, seq, pairs] or [batch, heads, seq, pairs]"
        must = f"with per_head=True, cos and sin must have the same shape {shapes}"
        raise error(
            _WHO,
            must if per_head else "cos and sin must have the same shape [seq, pairs], [batch, seq, pairs] or [pairs]",
            f"shapes {tuple(cos.shape)} and {tuple(sin.shape)}",
            "Pass tables of half width: one column for each pair, not one for each channel."
            + ("" if per_head else f" For one table per head, {shapes}, pass per_head=True."),
        )
    if rotary_dim is not None and 2 * cos.shape[-1] != rotary_dim:
        raise error(
            _WHO,
            f"cos and sin must have {rotary_dim // 2} columns, one for each pair of rotary_dim={rotary_dim}",
            f"shape {tuple(cos.shape)}",
            "Something changed the tables of a Rotation, such as tree_map. Make a new one with Rope.at(positions).",
        )
    if cos.layout is not torch.strided or sin.layout is not torch.strided:
        fix = "Convert them with .to_dense()."
        raise error(_WHO, "cos and sin must be dense tensors", f"{cos.layout} and {sin.layout}", fix)
    if cos.device != sin.device:
        fix = "Move one of them to the device of the other."
        raise error(_WHO, "cos and sin must be on the same device", f"{cos.device} and {sin.device}", fix)


def check_tensors(
    tensors: list[Tensor],
    layout: Layout,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    rotary_dim: int,
    *,
    per_head: bool = False,
) -> None:
    """Raise unless q, and k if present, have the axes of `layout` and match cos and sin.

    A quick check accepts nearly every valid call. If it rejects a call, separate checks run, which raise the errors.
    """
    if per_head or not _pass_quick_check(tensors, layout, cos, sin, head_dim, rotary_dim):
        for name, x in zip(("q", "k"), tensors, strict=False):
            check_tensor(name, x, layout, cos, sin, head_dim, rotary_dim, per_head=per_head)


def _pass_quick_check(
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


def check_tensor(
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
    """Raise unless x, called `name` in messages, has the axes of `layout` and matches cos and sin."""
    choice(_WHO, "layout", layout, AXES)
    check_tables(cos, sin, rotary_dim, per_head=per_head)
    if not isinstance(x, Tensor):
        raise error(_WHO, f"{name} must be a tensor", shown(x), "Pass queries or keys.")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else str(x.layout)
        fix = "Convert it to a dense tensor. For ragged batches, see ropewalk.positions."
        raise error(_WHO, f"{name} must be a dense tensor", kind, fix)
    if x.dtype not in _DTYPES:
        fix = "Convert it to one of them."
        raise error(_WHO, f"{name} must be float16, bfloat16, float32 or float64", str(x.dtype), fix)
    *_, count = AXES[layout]
    if x.ndim != count:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {count} axes",
            f"shape {tuple(x.shape)}",
            "Pass the layout of this tensor.",
        )
    if x.shape[-1] != head_dim:
        raise error(
            _WHO,
            f"{name} must have head_dim={head_dim} as its last axis",
            f"shape {tuple(x.shape)}",
            "For the rotated slice alone, use dataclasses.replace(rope, head_dim=rope.rotary_dim, rotary_offset=0).",
        )
    if per_head:
        _check_heads(name, x, layout, cos)
    _check_tokens(name, x, layout, cos, axes_without_batch=3 if per_head else 2)
    if x.device != cos.device:
        raise error(
            _WHO,
            f"{name} must be on {cos.device}, where cos and sin are",
            str(x.device),
            "Move the rotation with .to(device), or create it there: rope.at(positions, device=q.device).",
        )


def check_operator_arguments(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, rotary_offset: int, *, in_place: bool
) -> None:
    """Raise unless the arguments of an operator of `ops` are valid. A `Rotation` always passes valid arguments."""
    if not 1 <= len(tensors) <= 2:
        raise error(_WHO_OPERATOR, "tensors must be q, or q and k", f"{len(tensors)} tensors", "Use a Rotation.")
    # Tables with four axes always have a batch axis, of size 1 if all sequences share them.
    cos_rows, sin_rows = (table[0] if table.ndim == 4 and table.shape[0] == 1 else table for table in (cos, sin))
    for name, x in zip(("q", "k"), tensors, strict=False):
        head_dim = tensors[0].shape[-1] if tensors[0].ndim else 0
        check_tensor(name, x, layout, cos_rows, sin_rows, head_dim, per_head=cos.ndim == 4)
        if rotary_offset < 0 or rotary_offset + 2 * cos.shape[-1] > head_dim:
            raise error(
                _WHO_OPERATOR,
                f"the rotated channels must lie inside head_dim={head_dim}",
                f"{2 * cos.shape[-1]} channels from rotary_offset={rotary_offset}",
                "Use a Rotation.",
            )
    q, k = tensors[0], tensors[-1]
    if not can_share_call(q, k, layout):
        raise error(
            _WHO_OPERATOR,
            "q and k must have the same dtype, batch, tokens and requires_grad",
            f"{describe(q)} and {describe(k)}",
            "Call the operator once for each of them.",
        )
    if in_place:
        writable.check_writable(tensors, recorded=False)


def check_all_meta(tensors: list[Tensor]) -> None:
    """Raise if some arguments of an operator are on the meta device and others are not."""
    if not all(x.is_meta for x in tensors):
        devices = ", ".join(sorted({str(x.device) for x in tensors}))
        raise error(_WHO_OPERATOR, "all tensors must be on the same device", devices, "Use a Rotation.")


def can_share_call(q: Tensor, k: Tensor, layout: Layout) -> bool:
    """Return whether one kernel call can rotate both q and k, given that layout and head_dim are the same."""
    q_shape, k_shape, (batch, tokens, _, _) = q.shape, k.shape, AXES[layout]
    return (
        q.dtype == k.dtype
        and q.requires_grad == k.requires_grad
        and q_shape[tokens] == k_shape[tokens]
        and (batch is None or q_shape[batch] == k_shape[batch])
    )


def check_saveable(cos: Tensor) -> None:
    """Raise if the tables were created in inference mode, so autograd cannot save them for the backward pass."""
    if cos.is_inference():
        raise error(
            _WHO,
            "cos and sin must be ordinary tensors when a gradient is recorded",
            "tables created under torch.inference_mode()",
            "Call rope.at(positions) outside inference mode.",
        )


def _check_heads(name: str, x: Tensor, layout: Layout, cos: Tensor) -> None:
    heads = x.shape[AXES[layout][2]]
    if heads != cos.shape[-3]:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {cos.shape[-3]} heads, because each head has its own table",
            f"{heads} in shape {tuple(x.shape)}",
            "Check the layout. If q and k have different numbers of heads (GQA), rotate each with its own Rotation.",
        )


def _check_tokens(name: str, x: Tensor, layout: Layout, cos: Tensor, axes_without_batch: int) -> None:
    if cos.ndim == 1:
        return
    at_batch, at_tokens, *_ = AXES[layout]
    seq = x.shape[at_tokens]
    if seq != cos.shape[-2]:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {cos.shape[-2]} tokens, one for each position",
            f"{seq} in shape {tuple(x.shape)}",
            "Check the layout, and that the positions are those of these tokens.",
        )
    if cos.ndim == axes_without_batch:
        return
    if at_batch is None:
        raise error(
            _WHO,
            f"layout {layout!r} has no batch axis, so positions must have shape [tokens]",
            f"tables of shape {tuple(cos.shape)}",
            "Flatten the positions, or pass tensors with a batch axis.",
        )
    batch = x.shape[at_batch]
    if cos.shape[0] != 1 and cos.shape[0] != batch:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have batch size {cos.shape[0]}, as the positions have",
            f"{batch} in shape {tuple(x.shape)}",
            "Check the layout.",
        )
