"""Attention of a few new tokens over the keys and values in a cache, in one kernel that reads each of them once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels import backend, cpu, observed

MAX_TOKENS = 8
"""New tokens of a row, such as a token and the drafts after it, up to which this kernel is used. For more tokens, the
blocked products of PyTorch's attention are faster."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class VisibleKeys(NamedTuple):
    """Where the keys of each row are in a cache, and which of them its new tokens attend to.

    Key i of a row is in slot i of its block, or with `blocks`, in slot i % block_size of block `blocks[row, i //
    block_size]`. Its order is `first[row] + i`. A new token attends to the keys whose order is at most its own and,
    with a window, less than `window` smaller.

    Attributes:
        order: order of the new tokens, int64 `[batch, seq]`.
        keys: number of keys of a row.
        blocks: blocks of each row, int32 `[batch, blocks of a row]`. None if row i has block i.
        first: order of key 0 of each row, int64 `[batch]`. None means 0.
        counts: number of keys that each row has, int64 `[batch]`. None means `keys`.
        window: number of tokens that each token attends to, itself included. None means no limit.
        sinks: number of keys at the start of a row that another rotation of the queries belongs to.
    """

    order: Tensor
    keys: int
    blocks: Tensor | None = None
    first: Tensor | None = None
    counts: Tensor | None = None
    window: int | None = None
    sinks: int = 0


def attend_cached(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, *, scale: float
) -> Tensor | None:
    """Attend over the visible keys in one kernel, if a kernel supports the call.

    The scores, the online softmax and the weighted sum are computed in float32, and the result is rounded once. No
    gradient is recorded.

    Args:
        q: rotated queries, `[batch, seq, heads, head_dim]`; float32, bfloat16 or float16.
        far_q: the queries for the sinks, of the same shape. None if all keys belong to q.
        keys, values: `[blocks, block_size, kv_heads, head_dim]` in the dtype of q, with any strides except along the
            channels, which are adjacent.
        visible: the keys.
        scale: factor of the scores.

    Returns:
        A new tensor of the shape of q, with 0 for a token that attends to no key. None if the caller must use
        PyTorch's attention: there is no kernel for these tensors, a gradient is recorded, or a transform, mode or
        compilation is active.
    """
    arguments: tuple[Any, ...] = (
        *(q, far_q, keys, values, visible.blocks, visible.keys, visible.order, visible.first, visible.counts),
        *(visible.window or 0, visible.sinks, scale),
    )
    profiled = observed.is_profiled()
    with torch.profiler.record_function("ropewalk::attend_cached") if profiled else nullcontext():
        attended: Tensor | None
        on_cpu = backend.FAST_PATH and q.is_cpu
        attended = cpu.attend_plain(*(*arguments, profiled)) if on_cpu else _run_kernel(*arguments)
    return attended


def _run_kernel(q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, *others: Any) -> Tensor | None:
    """Do the work of `attend_cached` with a backend. Return None if PyTorch's attention must be used."""
    kernels = backend.KERNELS.get(q.device.type)
    if kernels is None or kernels.attend is None or observed.has_mode():
        return None
    inputs = [x for x in (q, far_q, keys, values, *others) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return None
    if q.dtype not in _DTYPES or not q.dtype == keys.dtype == values.dtype:
        return None
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or backend.kernel_for(*inputs) is not kernels:
        return None
    return kernels.attend(q, far_q, keys, values, *others)
