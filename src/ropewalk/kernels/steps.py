"""Copies of the steps on devices, kept from call to call: half a kilobyte for each rope, copied once."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_KEPT = 1024
_steps_on_device: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
# Captured CUDA graphs read these at every replay, so they are never freed.
_in_graphs: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def tensor_of(steps: tuple[int, ...], positions: Tensor) -> Tensor:
    """The steps as an int64 tensor beside positions.

    Kept for the next call, which then copies nothing to the device; but only where both are ordinary tensors: one
    made under FakeTensorMode, functorch or while compiling would poison the calls after it.
    """
    device = positions.device
    if (
        torch.compiler.is_compiling()
        or type(positions) is not Tensor
        or positions.is_meta
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    ):
        return torch.tensor(steps, dtype=torch.int64, device=device)
    kept = _steps_on_device.get((steps, device))
    if kept is None:
        kept = _made(steps, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[steps, device] = kept
    return kept


def _made(steps: tuple[int, ...], device: torch.device) -> Tensor:
    made = torch.tensor(steps, dtype=torch.int64, device=device)
    if type(made) is Tensor:  # a mode around us may have made it something else
        if len(_steps_on_device) >= _MOST_KEPT:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a stream may still read what is freed now
            _steps_on_device.clear()
        _steps_on_device[steps, device] = made
    return made


def bring(steps: tuple[int, ...], device: torch.device) -> bool:
    """Bring the steps to the device while PyTorch traces, and not when the compiled code first runs.

    That may be inside the memory of a CUDA graph ("reduce-overhead"), where nothing may be kept for later calls.
    """
    if torch.cuda.is_available() and (steps, device) not in _steps_on_device:
        _made(steps, device)
    return True


# What torch.compiler.assume_constant_result does, which would import the compiler (1.5 s) for those who do not compile.
bring._dynamo_marked_constant = True  # type: ignore[attr-defined]
