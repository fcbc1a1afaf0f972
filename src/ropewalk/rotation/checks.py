"""Check the arguments of a rotation: cos and sin, the tensors to rotate, and the arguments of the private operators."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._checks import RopeError, choice, describe, error, shown
from ropewalk._layout import AXES, Layout, Options
from ropewalk.rotation import writable
from ropewalk.rotation.placements import is_dtensor

_TABLE_DTYPES = (torch.float32, torch.float64)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AXES_SHARED, _AXES_PER_HEAD = (1, 2, 3), (3, 4)
_WHO, _WHO_OPERATOR = "Rotation", "torch.ops.ropewalk"


def check_tables(cos: Tensor, sin: Tensor, rotary_dim: int | None = None, *, per_head: bool = False) -> None:
    """Raise unless cos and sin are float32 or float64 tables with one column for each pair of `rotary_dim` channels."""
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor):
        got = shown(sin if isinstance(cos, Tensor) else cos)
        raise error(_WHO, "cos and sin must be tensors", got, "Make them with Rope.at(positions).")
    if cos.dtype != sin.dtype or cos.dtype not in _TABLE_DTYPES:
        raise error(
            _WHO,
            "cos and sin must both be float32 or float64",
            f"{cos.dtype} and {sin.dtype}",
            "Something cast them: .half() or .bfloat16() on a container, or the mixed precision of FSDP or DeepSpeed. "
            "Pass the Rotation without casting it.",
        )
    shape, axes = cos.shape, _AXES_PER_HEAD if per_head else _AXES_SHARED  # an attribute of a tensor takes 0.1 µs
    if shape != sin.shape or len(shape) not in axes or shape[-1] < 1:
        shapes = "[heads, seq, pairs] or [batch, heads, seq, pairs]"
        must = f"with per_head=True, cos and sin must have the same shape {shapes}"
        raise error(
            _WHO,
            must if per_head else "cos and sin must have the same shape [seq, pairs], [batch, seq, pairs] or [pairs]",
            f"shapes {tuple(shape)} and {tuple(sin.shape)}",
            "Pass tables of half width: one column for each pair, not one for each channel."
            + ("" if per_head else f" For one table per head, {shapes}, pass per_head=True."),
        )
    if rotary_dim is not None and 2 * shape[-1] != rotary_dim:
        raise error(
            _WHO,
            f"cos and sin must have {rotary_dim // 2} columns, one for each pair of rotary_dim={rotary_dim}",
            f"shape {tuple(shape)}",
            "Something changed the tables of a Rotation, such as tree_map. Make a new one with Rope.at(positions).",
        )
    if cos.layout is not torch.strided or sin.layout is not torch.strided:
        fix = "Convert them with .to_dense()."
        raise error(_WHO, "cos and sin must be dense tensors", f"{cos.layout} and {sin.layout}", fix)
    if not (cos.is_cpu and sin.is_cpu) and cos.device != sin.device:
        fix = "Move one of them to the device of the other."
        raise error(_WHO, "cos and sin must be on the same device", f"{cos.device} and {sin.device}", fix)


def check_call(
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    head_dim: int,
    rotary_dim: int,
    per_head: bool,
) -> tuple[Tensor, Tensor]:
    """Raise unless q, and k if present, have the axes of `layout` and match cos and sin.

    This is the only statement of the rule in Python. C++ states it again, to guard memory and for speed.

    Returns:
        cos and sin, with the four axes that kernels expect if each head has its own table.
    """
    if not isinstance(layout, str) or layout not in AXES:
        choice(_WHO, "layout", layout, AXES)
    check_tables(cos, sin, rotary_dim, per_head=per_head)
    at_batch, at_tokens, at_heads, count = AXES[layout]
    table = cos.shape
    has_batch = len(table) - per_head == 3
    name = "q"
    for x in tensors:
        if not isinstance(x, Tensor):
            raise error(_WHO, f"{name} must be a tensor", shown(x), "Pass queries or keys.")
        if x.layout is not torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else str(x.layout)
            fix = "Convert it to a dense tensor. For ragged batches, see ropewalk.positions."
            raise error(_WHO, f"{name} must be a dense tensor", kind, fix)
        if x.dtype not in _DTYPES:
            fix = "Convert it to one of them."
            raise error(_WHO, f"{name} must be float16, bfloat16, float32 or float64", str(x.dtype), fix)
        shape = x.shape
        if len(shape) != count:
            must, fix = f"{name} in layout {layout!r} must have {count} axes", "Pass the layout of this tensor."
            raise error(_WHO, must, f"shape {tuple(shape)}", fix)
        if shape[-1] != head_dim:
            fix = (
                "For the rotated slice alone, use dataclasses.replace(rope, head_dim=rope.rotary_dim, rotary_offset=0)."
            )
            raise error(_WHO, f"{name} must have head_dim={head_dim} as its last axis", f"shape {tuple(shape)}", fix)
        if per_head and shape[at_heads] != table[-3]:
            must = f"{name} in layout {layout!r} must have {table[-3]} heads, because each head has its own table"
            fix = (
                "Check the layout. If q and k have different numbers of heads (GQA), rotate each with its own Rotation."
            )
            raise error(_WHO, must, f"{shape[at_heads]} in shape {tuple(shape)}", fix)
        if len(table) > 1 and shape[at_tokens] != table[-2]:
            must = f"{name} in layout {layout!r} must have {table[-2]} tokens, one for each position"
            fix = "Check the layout, and that the positions are those of these tokens."
            raise error(_WHO, must, f"{shape[at_tokens]} in shape {tuple(shape)}", fix + _of_all_ranks(x))
        if has_batch and at_batch is None:
            must = f"layout {layout!r} has no batch axis, so positions must have shape [tokens]"
            fix = "Flatten the positions, or pass tensors with a batch axis."
            raise error(_WHO, must, f"tables of shape {tuple(table)}", fix)
        if has_batch and at_batch is not None and table[0] != shape[at_batch] and table[0] != 1:
            must = f"{name} in layout {layout!r} must have batch size {table[0]}, as the positions have"
            raise error(
                _WHO, must, f"{shape[at_batch]} in shape {tuple(shape)}", "Check the layout." + _of_all_ranks(x)
            )
        if not (x.is_cpu and cos.is_cpu) and x.device != cos.device:
            must = f"{name} must be on {cos.device}, where cos and sin are"
            fix = "Move the rotation with .to(device), or create it there: rope.at(positions, device=q.device)."
            raise error(_WHO, must, str(x.device), fix)
        name = "k"
    return (cos.unsqueeze(0), sin.unsqueeze(0)) if per_head and len(table) == 3 else (cos, sin)


def _of_all_ranks(x: Tensor) -> str:
    return " For DTensors, positions are those of all ranks, or a DTensor." if is_dtensor(x) else ""


def check_operator_arguments(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, options: Options, *, in_place: bool
) -> None:
    """Raise unless the arguments of an operator of `ops` are valid. A `Rotation` always passes valid arguments."""
    if not 1 <= len(tensors) <= 2:
        raise error(_WHO_OPERATOR, "tensors must be q, or q and k", f"{len(tensors)} tensors", "Use a Rotation.")
    # Tables with four axes always have a batch axis, of size 1 if all sequences share them.
    cos_rows, sin_rows = (table[0] if table.ndim == 4 and table.shape[0] == 1 else table for table in (cos, sin))
    head_dim = tensors[0].shape[-1] if tensors[0].ndim else 0
    rotary_dim = 2 * cos.shape[-1] if cos.ndim else 0
    check_call(tensors, cos_rows, sin_rows, options.layout, head_dim, rotary_dim, cos.ndim == 4)
    if options.offset < 0 or options.offset + rotary_dim > head_dim:
        raise error(
            _WHO_OPERATOR,
            f"the rotated channels must lie inside head_dim={head_dim}",
            f"{rotary_dim} channels from rotary_offset={options.offset}",
            "Use a Rotation.",
        )
    if not can_share_call(tensors, options.layout):
        raise error(
            _WHO_OPERATOR,
            "q and k must have the same dtype, batch, tokens and requires_grad",
            f"{describe(tensors[0])} and {describe(tensors[1])}",
            "Call the operator once for each of them.",
        )
    if in_place:
        writable.check_writable(tensors, recorded=False)


def check_all_meta(tensors: list[Tensor]) -> None:
    """Raise if some arguments of an operator are on the meta device and others are not."""
    if not all(x.is_meta for x in tensors):
        devices = ", ".join(sorted({str(x.device) for x in tensors}))
        raise error(_WHO_OPERATOR, "all tensors must be on the same device", devices, "Use a Rotation.")


def can_share_call(tensors: list[Tensor], layout: Layout) -> bool:
    """Return whether one kernel call can rotate q, or both q and k, given that layout and head_dim are the same."""
    if len(tensors) == 1:
        return True
    q, k = tensors
    q_shape, k_shape, (batch, tokens, _, _) = q.shape, k.shape, AXES[layout]
    return (
        q.dtype == k.dtype
        and q.requires_grad == k.requires_grad
        and q_shape[tokens] == k_shape[tokens]
        and (batch is None or q_shape[batch] == k_shape[batch])
    )


def not_saveable_error() -> RopeError:
    """Create the error for tables of inference mode, which autograd cannot save for the backward pass."""
    return error(
        _WHO,
        "cos and sin must be ordinary tensors when a gradient is recorded",
        "tables created under torch.inference_mode()",
        "Call rope.at(positions) outside inference mode.",
    )
