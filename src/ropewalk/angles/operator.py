"""Define `ropewalk::angles`, the `torch.library` operator that computes cos and sin in code compiled for a GPU.

The operator takes the phase steps as numbers and caches their copy on the device, as eager calls do. If they were a
constant tensor of the graph, every call would copy them to the GPU. `exact.py`, which decides precision, passes the
function that the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.angles.phase_steps import ensure_on_device

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)

_library: Any = torch.library.Library("ropewalk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "angles(Tensor positions, int[] phase_steps, float factor, ScalarType dtype, int[]? axis=None) -> (Tensor, Tensor)"
)

_Axis = tuple[int, ...] | None


def angles(
    positions: Tensor, phase_steps: tuple[int, ...], factor: float, dtype: torch.dtype, axis: _Axis = None
) -> tuple[Tensor, Tensor]:
    """Call the operator from code that is being compiled, after copying the phase steps to the device.

    Args:
        positions, phase_steps, factor, dtype, axis: as for `exact.cos_sin`.

    Returns:
        cos and sin, as from `exact.cos_sin`.
    """
    ensure_on_device(phase_steps, positions.device)
    if axis is not None:
        ensure_on_device(axis, positions.device)
    tables: tuple[Tensor, Tensor] = torch.ops.ropewalk.angles(positions, phase_steps, factor, dtype, axis)
    return tables


def define_angles(
    compute: Callable[[Tensor, tuple[int, ...], float, torch.dtype, _Axis], tuple[Tensor, Tensor]],
) -> None:
    """Register a function as the implementation of the operator. Call this once.

    The operator checks its arguments, because any code may call it.

    Args:
        compute: function of positions, phase_steps, factor, dtype and axis that returns cos and sin.
    """

    def checked(
        positions: Tensor, phase_steps: list[int], factor: float, dtype: torch.dtype, axis: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        if positions.dtype not in _INTEGERS or dtype not in _FLOATS or not phase_steps:
            raise _checks.error(
                "torch.ops.ropewalk.angles",
                "positions must be int32 or int64, dtype float32 or float64, and phase_steps not empty",
                f"{positions.dtype}, {dtype} and {len(phase_steps)} phase steps",
                "Use Rope.at.",
            )
        rows = positions.shape[0] if positions.ndim else 0
        if axis is not None and (len(axis) != len(phase_steps) or not all(0 <= a < rows for a in axis)):
            raise _checks.error(
                "torch.ops.ropewalk.angles",
                "axis must name a row of positions for each phase step",
                f"{_checks.shown(axis)} for {len(phase_steps)} phase steps and {rows} rows",
                "Use Rope.at.",
            )
        cos, sin = compute(positions, tuple(phase_steps), factor, dtype, None if axis is None else tuple(axis))
        return cos.contiguous(), sin.contiguous()  # without a kernel, their strides differ from those of `_meta`

    _library.impl("angles", checked, "CompositeExplicitAutograd")
    _library.impl("angles", _meta, "Meta")
    torch.library.register_vmap("ropewalk::angles", _vmap, lib=_library)


def _meta(
    positions: Tensor, phase_steps: list[int], factor: float, dtype: torch.dtype, axis: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    shape = positions.shape[axis is not None :]
    cos, sin = (positions.new_empty((*shape, len(phase_steps)), dtype=dtype) for _ in range(2))
    return cos, sin


def _vmap(
    info: Any, in_dims: tuple[Any, ...], positions: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    to = 0 if len(rest) < 4 or rest[3] is None else 1  # after the axis of rows
    return torch.ops.ropewalk.angles(positions.movedim(in_dims[0], to), *rest), (0, 0)
