"""Does a tensor fit the tables? Every check of a rotation's arguments, and its message."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._checks import LAYOUTS, choice, error, shown

_TABLE_DTYPES = (torch.float32, torch.float64)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHO = "Rotation"


def tables(cos: Tensor, sin: Tensor) -> None:
    """Raise unless cos and sin are a pair of half-width tables in a dtype that holds an angle."""
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
    if cos.shape != sin.shape or not 1 <= cos.ndim <= 3 or cos.shape[-1] < 1:
        raise error(
            _WHO,
            "cos and sin must have the same shape [seq, pairs], [batch, seq, pairs] or [pairs]",
            f"shapes {tuple(cos.shape)} and {tuple(sin.shape)}",
            "Half width: one column for each pair, not one for each channel.",
        )
    if cos.device != sin.device:
        raise error(_WHO, "cos and sin must be on the same device", f"{cos.device} and {sin.device}", "Move one.")


# Of each layout: how many axes, and where tokens and batch stand among them.
_AXES = {"bshd": (4, 1, 0), "bhsd": (4, 2, 0), "sbhd": (4, 0, 1), "thd": (3, 0, None)}


def tensors_fit(tensors: list[Tensor], layout: str, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """Raise unless q, and k if there is one, have the axes that `layout` says and the sizes of the tables.

    A quick look at what is nearly always so; only where it is not, each check by itself with its message.
    """
    if not _plainly_fit(tensors, layout, cos, sin, head_dim):
        for name, x in zip(("q", "k"), tensors, strict=False):
            tensor_fits(name, x, layout, cos, sin, head_dim)


def _plainly_fit(tensors: list[Tensor], layout: str, cos: Tensor, sin: Tensor, head_dim: int) -> bool:
    axes, table = _AXES.get(layout) if isinstance(layout, str) else None, cos.shape
    if axes is None or cos.dtype not in _TABLE_DTYPES or sin.dtype != cos.dtype or sin.shape != table or len(table) < 2:
        return False
    count, tokens, batch = axes
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


def tensor_fits(name: str, x: Tensor, layout: str, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """Raise unless x, called `name`, has the axes that `layout` says and the sizes of the tables."""
    choice(_WHO, "layout", layout, LAYOUTS)
    tables(cos, sin)
    if not isinstance(x, Tensor):
        raise error(_WHO, f"{name} must be a tensor", shown(x), "Pass queries or keys.")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else str(x.layout)
        raise error(_WHO, f"{name} must be a dense tensor", kind, "Make it dense; for ragged batches see positions.")
    if x.dtype not in _DTYPES:
        raise error(_WHO, f"{name} must be float16, bfloat16, float32 or float64", str(x.dtype), "Convert it first.")
    if x.ndim != len(layout):
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {len(layout)} axes",
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
    _tokens_fit(name, x, layout, cos)
    if x.device != cos.device:
        raise error(
            _WHO,
            f"{name} must be on {cos.device}, where cos and sin are",
            str(x.device),
            "Move the rotation with .to(device), or make it there: rope.at(positions, device=q.device).",
        )


def can_be_written(x: Tensor) -> None:
    """Raise if x cannot be turned in place."""
    who = "Rotation.apply_"
    if not x.is_contiguous() and any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
        raise error(
            who,
            "each element must have memory of its own",
            f"strides {x.stride()} of shape {tuple(x.shape)}",
            "Call the rotation for a new tensor, or expand after turning.",
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise error(
            who,
            "outside inference mode an ordinary tensor is needed",
            "one made under torch.inference_mode()",
            "Call the rotation for a new tensor, or clone it first.",
        )


def can_be_saved(cos: Tensor) -> None:
    """Raise if the tables cannot be kept for the backward pass."""
    if cos.is_inference():
        raise error(
            _WHO,
            "a gradient is wanted, so cos and sin must be ordinary tensors",
            "tables made under torch.inference_mode()",
            "Call rope.at(positions) outside inference mode.",
        )


def _tokens_fit(name: str, x: Tensor, layout: str, cos: Tensor) -> None:
    if cos.ndim == 1:
        return
    seq = x.shape[layout.index("t" if layout == "thd" else "s")]
    if seq != cos.shape[-2]:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have {cos.shape[-2]} tokens, one for each position",
            f"{seq} in shape {tuple(x.shape)}",
            "Is the layout right, and are these the positions of these tokens?",
        )
    if cos.ndim == 2:
        return
    if layout == "thd":
        raise error(
            _WHO,
            "layout 'thd' has no batch axis and needs positions [tokens]",
            f"tables of shape {tuple(cos.shape)}",
            "Flatten the positions, or pass tensors with their batch axis.",
        )
    batch = x.shape[layout.index("b")]
    if cos.shape[0] != 1 and cos.shape[0] != batch:
        raise error(
            _WHO,
            f"{name} in layout {layout!r} must have batch size {cos.shape[0]}, that of the positions",
            f"{batch} in shape {tuple(x.shape)}",
            "Is the layout right?",
        )


def share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether two tensors with the same strides have an element in common. With other strides it is not looked for."""
    if q is k:
        return True
    if type(q) is not Tensor or type(k) is not Tensor or q.is_meta or q.stride() != k.stride() or q.dtype != k.dtype:
        return False
    if torch._C._are_functorch_transforms_active() or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return False
    axes = sorted(zip(q.stride(), q.shape, k.shape, strict=True), reverse=True)
    return _is_reached(int(k.storage_offset()) - int(q.storage_offset()), axes)


def _is_reached(distance: int, axes: list[tuple[int, int, int]]) -> bool:
    """Whether steps along the axes, those of an element of q less those of one of k, can add up to the distance."""
    if not axes:
        return distance == 0
    (stride, of_q, of_k), rest = axes[0], axes[1:]
    if stride == 0:
        return _is_reached(distance, rest)
    nearest = distance // stride
    return any(
        -of_k < steps < of_q and _is_reached(distance - steps * stride, rest) for steps in (nearest, nearest + 1)
    )
