"""`ropewalk::angles`, cos and sin as an operator of `torch.library`: what code compiled for a GPU calls.

It is given the steps as numbers, and keeps their copy on the device as eager calls do: a constant of the graph would be
copied to the GPU at every call. What it computes is said by `angles.py`, which decides precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.kernels import steps as _steps

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)

_library: Any = torch.library.Library("ropewalk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("angles(Tensor positions, int[] steps, float factor, ScalarType dtype) -> (Tensor, Tensor)")


def angles(positions: Tensor, steps: tuple[int, ...], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Call the operator from code that is being compiled; the steps are on the device before it first runs."""
    _steps.bring(steps, positions.device)
    made: tuple[Tensor, Tensor] = torch.ops.ropewalk.angles(positions, steps, factor, dtype)
    return made


def define_angles(
    compute: Callable[[Tensor, tuple[int, ...], float, torch.dtype], tuple[Tensor, Tensor]],
) -> None:
    """Make the operator `compute(positions, steps, factor, dtype)`, once. Anybody may call it, so it checks first."""

    def checked(positions: Tensor, steps: list[int], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions.dtype not in _INTEGERS or dtype not in _FLOATS or not steps:
            raise _checks.error(
                "torch.ops.ropewalk.angles",
                "positions must be int32 or int64, dtype float32 or float64, and there must be steps",
                f"{positions.dtype}, {dtype} and {len(steps)} steps",
                "Use Rope.at.",
            )
        return compute(positions, tuple(steps), factor, dtype)

    for key in ("CPU", "CUDA"):
        _library.impl("angles", checked, key)
    _library.impl("angles", _meta, "Meta")
    torch.library.register_vmap("ropewalk::angles", _vmap, lib=_library)


def _meta(positions: Tensor, steps: list[int], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = (positions.new_empty((*positions.shape, len(steps)), dtype=dtype) for _ in range(2))
    return cos, sin


def _vmap(
    info: Any, in_dims: tuple[Any, ...], positions: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return torch.ops.ropewalk.angles(positions.movedim(in_dims[0], 0), *rest), (0, 0)
