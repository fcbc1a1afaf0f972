"""Load the compiled CPU kernels, or record why they are unavailable, and call them. Implements `backend.Kernels`.

torch must be imported first: the kernels use its threads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os

import torch
from torch import Tensor

from ropewalk._layout import AXES, Options
from ropewalk.kernels import observed

device_name = "CPU"
# `step_plain` and `attend_plain` do the same, and check their arguments themselves.
step = None
attend = None

_unavailable_reason: str | None = None
try:
    importlib.import_module("._cpu", __package__)  # `from ... import` does not tell a missing module from a broken one
    from ropewalk.kernels import _cpu
except ModuleNotFoundError:
    _unavailable_reason = (
        "not built when ropewalk was installed, which requires a C++17 compiler and the Python headers"
    )
except ImportError as e:
    _unavailable_reason = f"cannot be loaded: {e}"


def _openmp() -> list[int]:
    """Return the addresses of the OpenMP functions that csrc/threads.h calls, or an empty list without OpenMP.

    They belong to the OpenMP library that torch has loaded.
    """
    if os.name != "posix":
        return []
    process, names = ctypes.CDLL(None), ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    try:
        return [ctypes.cast(process[name], ctypes.c_void_p).value or 0 for name in names]
    except AttributeError:
        return []


if _unavailable_reason is None and (functions := _openmp()):
    _cpu.use_openmp(*functions)

if _unavailable_reason is None and not _cpu.use_torch(torch, AXES, observed.PREDICATES):
    _unavailable_reason = "need PyTorch 2.10 or later"

FAST_PATH = _unavailable_reason is None
"""Whether `rotate_plain`, `step_plain`, `attend_plain` and `angles_plain` exist. They run a whole call in compiled
code, including the checks, and return None if they cannot."""
if FAST_PATH:
    rotate_plain, step_plain, angles_plain = _cpu.rotate_plain, _cpu.step_plain, _cpu.angles_plain
    attend_plain = _cpu.attend_plain


@functools.cache  # because every call asks
def unavailable(device: torch.device | None = None) -> str | None:
    """Return why the CPU kernels cannot be used, or None if they can."""
    return _unavailable_reason


def version() -> str:
    """Return the name of the instruction set whose kernels are used."""
    return _cpu.levels()[-1]


def rotate(
    tensors: list[Tensor],
    outputs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
) -> None:
    """Rotate tensors into outputs, as `Kernels.rotate` specifies."""
    layout, interleaved, offset, inverse = options
    _cpu.rotate(tensors, outputs, cos, sin, AXES[layout], interleaved, offset, inverse)


def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    options: Options,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to cos and sin, as `Kernels.table_gradient` specifies."""
    x = tensors[0]
    batch, tokens, heads, _ = AXES[options.layout]
    shape = (1 if batch is None else x.shape[batch], *((x.shape[heads],) if per_head else ()), x.shape[tokens], pairs)
    made, dtype = (
        torch.empty if x.numel() else torch.zeros,
        torch.float64 if x.dtype == torch.float64 else torch.float32,
    )
    d_cos, d_sin = made(shape, dtype=dtype, device="cpu"), made(shape, dtype=dtype, device="cpu")
    _cpu.table_gradient(tensors, grads, d_cos, d_sin, AXES[options.layout], options.interleaved, options.offset)
    return d_cos, d_sin


def angles(
    positions: Tensor, phase_steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, as `Kernels.angles` specifies."""
    positions = positions.to(torch.int64).contiguous()
    shape = positions.shape if axis is None else positions.shape[1:]
    cos, sin = (torch.empty((*shape, len(phase_steps)), dtype=dtype, device="cpu") for _ in range(2))
    if cos.numel():
        _cpu.angles(positions, axis, phase_steps, factor, cos, sin)
    return cos, sin
