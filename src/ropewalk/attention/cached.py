"""Attention of a few new tokens over the keys and values in a cache, in one kernel that reads each of them once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite

from ropewalk.kernels import backend, cpu, observed
from ropewalk.kernels.visible import VisibleKeys

MAX_TOKENS = 8
"""New tokens of a row, such as a token and the drafts after it, up to which this kernel is used. For more tokens, the
blocked products of PyTorch's attention are faster."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_cached(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, *, scale: float
) -> Tensor | None:
    """Attend over the visible keys in one kernel, if a kernel supports the call.

    The scores, the online softmax and the weighted sum are computed in float32, and the result is rounded once. No
    gradient is recorded.

    Args:
        q: rotated queries, `[batch, seq, heads, head_dim]`; float32, bfloat16 or float16.
        far_q: the queries for the sinks, of the same shape. None if all keys belong to q.
        keys, values: `[blocks, block_size, kv_heads, head_dim]` in the dtype of q, or int8 or float8_e4m3fn with
            scales, with any strides except along the channels, which are adjacent.
        visible: the keys, and the scales.
        scale: factor of the scores.

    Returns:
        A new tensor of the shape of q, with 0 for a token that attends to no key. None if the caller must use
        PyTorch's attention: there is no kernel for these tensors, a gradient is recorded, or a transform, mode or
        compilation is active.
    """
    if not torch.compiler.is_compiling():
        return _run(q, far_q, keys, values, visible, scale)
    supported = backend.FAST_PATH and q.is_cpu and _fits(q, far_q, keys, values, visible)
    if not supported or torch.compiler.is_exporting():
        return None
    attended: Tensor = torch.ops.ropewalk.attend_cached.default(q, far_q, keys, values, *visible, scale)
    return attended


def _run(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor | None:
    profiled = observed.is_profiled()
    with torch.profiler.record_function("ropewalk::attend_cached") if profiled else nullcontext():
        if not (backend.FAST_PATH and q.is_cpu):
            return _run_kernel(q, far_q, keys, values, visible, scale)
        order, count, blocks, first, counts, window, sinks, k_scales, v_scales = visible
        at = blocks, count, order, first, counts, window or 0, sinks
        attended: Tensor | None = cpu.attend_plain(q, far_q, keys, values, *at, k_scales, v_scales, scale, profiled)
        return attended


def _run_kernel(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor | None:
    """Do the work of `attend_cached` with a backend. Return None if PyTorch's attention must be used."""
    kernels = backend.KERNELS.get(q.device.type)
    if kernels is None or kernels.attend is None or observed.has_mode():
        return None
    if not _fits(q, far_q, keys, values, visible):
        return None
    inputs = [x for x in (q, far_q, keys, values, *visible) if isinstance(x, Tensor)]
    if backend.kernel_for(*inputs) is not kernels:
        return None
    return kernels.attend(q, far_q, keys, values, visible, scale)


def _fits(q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys) -> bool:
    """Return whether a kernel supports dtypes and strides, and no gradient is recorded. Compiled code checks itself."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, far_q, keys, values)):
        return False
    kept = (q.dtype,) if visible.key_scales is None else (torch.int8, torch.float8_e4m3fn)
    if q.dtype not in _DTYPES or keys.dtype not in kept or values.dtype != keys.dtype:
        return False
    return bool(keys.stride(-1) == values.stride(-1) == 1) and keys.shape == values.shape


# Under torch.compile the kernel is an operator. Exported programs use PyTorch's attention, which needs no ropewalk.
_library: Any = get_library_allowing_overwrite("ropewalk", "attend_cached")  # as in rotation/ops.py
_library.define(
    "attend_cached(Tensor q, Tensor? far_q, Tensor keys, Tensor values, Tensor order, SymInt count, Tensor? blocks, "
    "Tensor? first, Tensor? counts, SymInt? window, SymInt sinks, Tensor? key_scales, Tensor? value_scales, "
    "float scale) -> Tensor"
)


def _operator(q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, *of_visible: Any) -> Tensor:
    visible, scale = VisibleKeys(*of_visible[:-1]), of_visible[-1]
    with torch.no_grad():
        attended = _run(q, far_q, keys, values, visible, scale)
        return _reference(q, far_q, keys, values, visible, scale) if attended is None else attended


def _reference(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    """Do the same in plain PyTorch, for an operator whose kernel may not run, as under a mode."""
    order, count, blocks, first, counts, window, sinks, key_scales, value_scales = visible
    batch, _, heads, _ = q.shape

    def rows_of(x: Tensor, scales: Tensor | None) -> Tensor:
        x = x[:batch] if blocks is None else x.index_select(0, blocks.flatten()).view(batch, -1, *x.shape[2:])
        x = x[:, :count].float()
        return x if scales is None else x * rows_of(scales[..., None], None)

    index = torch.arange(count, device=q.device)
    is_sink = index < sinks
    key_order = index if first is None else torch.where(is_sink, index, first[:, None] + index)  # [keys], [batch, keys]
    distance = order[:, :, None] - (key_order if first is None else key_order[:, None])
    seen = distance >= 0 if window is None else (distance >= 0) & ((distance < window) | is_sink)
    seen = seen if counts is None else seen & (index < counts[:, None, None])
    unseen = ~seen.any(1)[:, :, None, None]  # slots that nobody sees may hold NaN
    k, v = (
        rows_of(x, scales).masked_fill(unseen, 0).repeat_interleave(heads // x.shape[2], 2)
        for x, scales in ((keys, key_scales), (values, value_scales))
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k)
    if far_q is not None:
        scores = torch.where(is_sink, torch.einsum("bqhd,bkhd->bhqk", far_q.float(), k), scores)
    scores = (scale * scores).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None, :, None], 0)
    return torch.empty_like(q).copy_(torch.einsum("bhqk,bkhd->bqhd", weights, v))


_library.impl("attend_cached", _operator, "CPU")
_library.impl("attend_cached", lambda q, *arguments: torch.empty_like(q), "Meta")
