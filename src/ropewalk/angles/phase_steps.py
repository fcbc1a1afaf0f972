"""Cache the phase steps of ropes on each device, so that they are copied once. Those of 64 pairs take 512 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.kernels.observed import must_trace

_MAX_COPIES = 1024
_copies: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
# Captured CUDA graphs read these at every replay, so they are never freed.
_in_graphs: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def device_copy(phase_steps: tuple[int, ...], positions: Tensor) -> Tensor:
    """Return the phase steps as an int64 tensor on the device of positions.

    The tensor is cached only if both it and positions are ordinary tensors. A cached tensor that was created under
    FakeTensorMode or functorch, or while compiling, would break later calls.
    """
    device = positions.device
    if must_trace() or type(positions) is not Tensor or positions.is_meta:
        return torch.tensor(phase_steps, dtype=torch.int64, device=device)
    copy = _copies.get((phase_steps, device))
    if copy is None:
        copy = _upload(phase_steps, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[phase_steps, device] = copy
    return copy


def _upload(phase_steps: tuple[int, ...], device: torch.device) -> Tensor:
    copy = torch.tensor(phase_steps, dtype=torch.int64, device=device)
    if type(copy) is Tensor:  # an active mode may have returned a tensor of another type
        if len(_copies) >= _MAX_COPIES:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a stream may still be reading the copies to be freed
            _copies.clear()
        _copies[phase_steps, device] = copy
    return copy


def ensure_on_device(phase_steps: tuple[int, ...], device: torch.device) -> bool:
    """Copy the phase steps to the device while PyTorch traces, before the compiled code first runs.

    The first run may allocate in the memory pool of a CUDA graph ("reduce-overhead"), where no copy may be cached.
    """
    if torch.cuda.is_available() and (phase_steps, device) not in _copies:
        _upload(phase_steps, device)
    return True


# The effect of torch.compiler.assume_constant_result, which would import the compiler (1.5 s) even if it is not used.
ensure_on_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
