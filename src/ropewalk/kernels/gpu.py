"""Probe and launch the kernels of `triton_kernels.py`. Implements `backend.Kernels`.

Triton is imported, and kernels are compiled, only when a GPU is used.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk._layout import Options
from ropewalk.kernels.gpu_plans import (
    Plan,
    angles_launch,
    attention_launches,
    counts,
    gradient_launch,
    power_of_two,
    rotation_launch,
    step_launch,
)

if TYPE_CHECKING:
    from ropewalk.kernels.visible import StoreArguments, VisibleKeys

device_name = "GPU"


def unavailable(device: torch.device | None = None) -> str | None:
    """Return why the GPU kernels cannot be used on a device, or None if they can.

    The first call for each GPU compiles and launches the smallest kernel as a probe.
    """
    if device in _reasons:  # every call passes here
        return _reasons[device]
    if not torch.cuda.is_available():
        return "no GPU found"
    index = None if device is None else device.index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device not in _reasons:
        if torch.cuda.is_current_stream_capturing():
            return None  # a probe cannot run during capture; an unusable kernel raises when it is launched
        _reasons[device] = _probe(device)
    return _reasons[device]


_reasons: dict[torch.device | None, str | None] = {}


def _probe(device: torch.device) -> str | None:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 (compute capability 8.0 or higher is needed)"
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        angles(zero, zero, 1.0, torch.float32)
    except ImportError as e:
        return f"Triton is not installed ({e})"
    except Exception as e:  # Triton has no common error for missing parts, such as a C compiler
        return f"Triton cannot compile or launch a kernel here ({type(e).__name__}: {e})"
    return None


def version() -> str:
    """Return the version of Triton and the name of the GPU."""
    import triton

    return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"


def rotate(
    tensors: list[Tensor],
    outputs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
) -> None:
    """Rotate tensors into outputs, as `Kernels.rotate` specifies."""
    _launch(*rotation_launch(tensors, outputs, cos, sin, options))


def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    pairs: int,
    options: Options,
    per_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to cos and sin, as `Kernels.table_gradient` specifies."""
    x = tensors[0]
    batch, tokens, heads = counts(x.shape, options.layout)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (batch, heads, tokens, pairs) if per_head else (batch, tokens, pairs)
    d_cos, d_sin = torch.empty(shape, dtype=dtype, device=x.device), torch.empty(shape, dtype=dtype, device=x.device)
    _launch(*gradient_launch(tensors, grads, d_cos, d_sin, options))
    return d_cos, d_sin


def angles(
    positions: Tensor, phase_steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, as `Kernels.angles` specifies."""
    positions = positions.contiguous()
    tokens, device = positions.shape if axis is None else positions.shape[1:], positions.device
    shape = (*tokens, phase_steps.shape[0])
    cos, sin = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
    _launch(*angles_launch(positions, phase_steps, cos, sin, factor, axis))
    return cos, sin


def step(
    tensors: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    options: Options,
    norm: tuple[Tensor, Tensor, float, bool] | None,
    store: StoreArguments | None,
) -> None:
    """Normalize, rotate and store, as `backend.FusedStep` specifies."""
    _launch(*step_launch(tensors, outputs, cos, sin, options, norm, store))


def attend(
    q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
) -> Tensor | None:
    """Attend over the keys of a cache, as `backend.CachedAttention` specifies, with heads of up to 1 KiB."""
    if power_of_two(q.shape[-1]) * q.element_size() > 1024 or keys.shape != values.shape:
        return None  # some GPUs have too little shared memory
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for launch in attention_launches(q, far_q, keys, values, visible, scale, out):
        _launch(*launch)
    return out


def kernels() -> ModuleType:
    """Import the module of the kernels, and with it Triton. Return the module."""
    from ropewalk.kernels import triton_kernels

    return triton_kernels


def _launch(plan: Plan, tensors: tuple[Tensor, ...]) -> None:
    """Launch a kernel on the device of the tensors."""
    if not plan.programs:
        return
    device = tensors[0].get_device()
    if _has_several_gpus() and device != torch.cuda.current_device():
        # Triton launches kernels on the current device, even if the tensors are on another one.
        with torch.cuda.device(device):
            _launch(plan, tensors)
        return
    kernel = getattr(kernels(), plan.kernel)
    numbers = [plan.numbers[name] for name in kernel.arg_names[len(tensors) :]]
    kernel[(plan.programs,)](*tensors, *numbers, num_warps=plan.warps, **plan.options)


@functools.cache
def _has_several_gpus() -> bool:
    return torch.cuda.device_count() > 1
