"""PyTorch's ring attention as one operator, which computes only the rectangles of queries and keys that are visible.

PyTorch's template sends keys and values round the ranks, calls a kernel in each step, and merges the results. It is
private, but the same from PyTorch 2.10 on. It knows two orders and no documents, so ropewalk passes it a kernel that
knows which keys are visible in each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as engine

from ropewalk import _checks

_aten = torch.ops.aten
_c10d: Any = dist.distributed_c10d


@torch.library.custom_op("ropewalk::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, group: str) -> tuple[Tensor, Tensor]:
    """Attend with this rank's queries over the keys of all ranks. Every rank of the group must call it.

    One operator, so that torch.compile and activation checkpointing see nothing of the ring.

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k, v: `[batch, kv_heads, seq, head_dim]`; kv_heads divides heads.
        visible: the rectangles to compute, int64 `[rectangles, 6]` on the CPU: the step, the first query and the end of
            the queries, the first key and the end of the keys, and 1 if the rectangle is a causal square. Step i has
            the keys of the rank i places before this one. In a step, no query and no key is in two rectangles.
        scale: factor of the scores.
        group: name of the process group.

    Returns:
        The output, like q, and the logarithm of the sum of exponentials of each row, `[batch, heads, seq]`.
    """
    with _options(q.dtype):
        resolved = _c10d._resolve_process_group(group)
        out, sums = engine._templated_ring_attention(resolved, 2, _Kernel(visible, scale).forward, q, k, v)
    return out, sums


@torch.library.custom_op("ropewalk::ring_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    visible: Tensor,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with _options(q.dtype):
        kernel = _Kernel(visible, scale).backward
        resolved = _c10d._resolve_process_group(group)
        grads = engine._templated_ring_attention_backward(
            resolved, 2, kernel, grad, "grad", q, k, v, out, sums, is_causal=False
        )
    # An operator's results must not share memory, as the gradients of keys and values do here.
    to_q, to_k, to_v = (torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), grads, strict=True))
    return to_q, to_k, to_v


@ring_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_accumulated(q.dtype))


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, visible, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output, visible)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.group), None, None, None)


ring_attention.register_autograd(_differentiate, setup_context=_save)


class _Kernel:
    """The attention that PyTorch's ring calls once in each step, for the rectangles of `ring_attention`."""

    def __init__(self, visible: Tensor, scale: float) -> None:
        self._step, self._scale = -1, scale
        self._rectangles: dict[int, list[list[int]]] = defaultdict(list)
        for step, *rectangle in visible.tolist():
            self._rectangles[step].append(rectangle)

    def _next_step(self) -> Iterator[tuple[slice, slice, bool]]:
        self._step += 1
        for q_begin, q_end, k_begin, k_end, is_causal in self._rectangles[self._step]:
            yield slice(q_begin, q_end), slice(k_begin, k_end), bool(is_causal)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Return output and sums of a step. A query without visible keys has output 0 and sum −∞."""
        suffix = "_for_cpu" if query.is_cpu else ""
        attend = getattr(_aten, f"_scaled_dot_product_flash_attention{suffix}")
        out = torch.zeros_like(query)
        sums = query.new_full(query.shape[:3], -torch.inf, dtype=_accumulated(query.dtype))
        for rows, keys, is_causal in self._next_step():
            of = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            out[:, :, rows], sums[:, :, rows] = attend(*of, 0.0, is_causal, scale=self._scale)[:2]
        return out, sums

    def backward(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a step, in the dtype in which the ring adds them."""
        dtype, (grad, out, sums) = _accumulated(query.dtype), (more[name] for name in ("grad", "out", "logsumexp"))
        to_q, to_k, to_v = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        for rows, keys, is_causal in self._next_step():
            of_rows = [x[:, :, rows] for x in (grad, query, out)]
            of_keys = [x[:, :, keys] for x in (key, value)]
            arguments = (of_rows[0], of_rows[1], *of_keys, of_rows[2], sums[:, :, rows].contiguous())
            if query.is_cpu:
                grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *arguments, 0.0, is_causal, scale=self._scale
                )
            else:  # the operator of CUDA takes what only ragged rows and dropout need
                lengths = of_rows[1].shape[2], of_keys[0].shape[2]
                seed, offset = (query.new_zeros(shape, dtype=torch.uint64) for shape in ((2,), ()))
                grads = _aten._scaled_dot_product_flash_attention_backward(
                    *arguments, None, None, *lengths, 0.0, is_causal, seed, offset, scale=self._scale
                )
            to_q[:, :, rows], to_k[:, :, keys], to_v[:, :, keys] = grads
        return to_q, to_k, to_v


def check_supported(who: str, q: Tensor) -> None:
    """Raise unless PyTorch has a flash kernel for q on its device, which is a CPU or a CUDA device."""
    if q.is_cuda and (q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8):
        must = "on a GPU q must be bfloat16 or float16, with head_dim a multiple of 8, for PyTorch's flash kernel"
        fix = "Use autocast, or pass mask=context.block_mask(mask_mod), which needs all keys on each rank."
        raise _checks.error(who, must, f"{q.dtype} and head_dim={q.shape[-1]}", fix)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _options(dtype: torch.dtype) -> Iterator[None]:
    """Let the ring pass the keys from rank to rank instead of gathering them, and skip what is hidden only by us."""
    options = engine._cp_options
    before = dict(vars(options))
    options.enable_load_balance, options.rotate_method = False, engine._RotateMethod.ALL_TO_ALL
    options.convert_to_f32 = dtype != torch.float64
    try:
        yield
    finally:
        vars(options).update(before)
