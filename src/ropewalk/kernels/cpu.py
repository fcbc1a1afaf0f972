"""The compiled CPU kernels: loaded, or the reason why they are not; and what they are given.

Only addresses, shapes and strides go over. torch is imported first, since the kernels share its threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk._layout import AXES, Layout

why_not = ""
"""Why the kernels cannot be used; empty where they can."""

try:
    import ropewalk.kernels._cpu as _cpu  # `from ... import` does not tell a missing module from a broken one
except ModuleNotFoundError:
    why_not = "not built when ropewalk was installed, which takes a C++17 compiler and the headers of Python"
except ImportError as e:
    why_not = f"cannot be loaded: {e}"

# The numbers of csrc/ropewalk.h.
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def level() -> str:
    """The instruction set whose kernels run."""
    return _cpu.levels()[-1]


def rotate(
    tensors: list[Tensor],
    outputs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    interleaved: bool,
    rotary_offset: int,
    back: bool,
) -> None:
    """Write the tensors, turned, to `outputs`, which may be the tensors themselves.

    Args:
        tensors: one or two with all but the number of heads in common, in `layout`.
        cos, sin: `[pairs]`, `[seq, pairs]` or `[batch, seq, pairs]`, as in `Rotation`.
        back: turn by minus the angle.
    """
    _cpu.rotate(
        _flat(tensors, outputs),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape,
        cos.stride(),
        sin.stride(),
        _DTYPES[tensors[0].dtype],
        _DTYPES[cos.dtype],
        AXES[layout],
        interleaved,
        rotary_offset,
        back,
        torch.get_num_threads(),
    )


def table_gradient(
    tensors: list[Tensor], grads: list[Tensor], pairs: int, layout: Layout, interleaved: bool, rotary_offset: int
) -> tuple[Tensor, Tensor]:
    """The gradient to cos and sin of `rotate`, summed over heads and tensors.

    Returns:
        Two tensors `[batch, seq, pairs]`; float64 for float64 tensors, else float32.
    """
    x = tensors[0]
    batch, tokens, *_ = axes = AXES[layout]
    shape = (1 if batch is None else x.shape[batch], x.shape[tokens], pairs)
    d_cos, d_sin = (
        torch.empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32) for _ in range(2)
    )
    _cpu.table_gradient(
        _flat(tensors, grads),
        d_cos.data_ptr(),
        d_sin.data_ptr(),
        shape,
        _DTYPES[x.dtype],
        axes,
        interleaved,
        rotary_offset,
        torch.get_num_threads(),
    )
    return d_cos, d_sin


def angles(positions: Tensor, steps: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of int32 or int64 positions times int64 steps, in 2⁻⁶⁴ turns; times `factor`."""
    positions = positions.to(torch.int64).contiguous()
    cos, sin = (torch.empty((*positions.shape, len(steps)), dtype=dtype) for _ in range(2))
    _cpu.angles(
        positions.data_ptr(),
        positions.numel(),
        steps.data_ptr(),
        len(steps),
        factor,
        _DTYPES[dtype],
        cos.data_ptr(),
        sin.data_ptr(),
        torch.get_num_threads(),
    )
    return cos, sin


def _flat(tensors: list[Tensor], others: list[Tensor]) -> tuple[object, ...]:
    """What `_cpu` wants to know of each: addresses, shape and strides."""
    flat: tuple[object, ...] = ()
    for x, y in zip(tensors, others, strict=True):
        address, strides = x.data_ptr(), x.stride()
        flat += (address, address if y is x else y.data_ptr(), x.shape, strides, strides if y is x else y.stride())
    return flat
