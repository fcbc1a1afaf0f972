"""Is somebody watching? Whether PyTorch may observe, record or change the operators inside a call.

torch has no public function for most of these questions, so all uses of its private ones are here.
"""

from __future__ import annotations

import torch

is_profiled = torch._C._autograd._profiler_enabled

PREDICATES = (
    torch._C._are_functorch_transforms_active,
    torch._C._is_tracing,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    is_profiled,
)
"""All functions that C++ asks at each call (csrc/plain.h). The one for the profiler must be the last."""


def must_trace() -> bool:
    """Return whether the call must run in PyTorch's own operators, which it can differentiate, map and record.

    This is so in a transform of torch.func, in forward-mode AD, in compilation and in export.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def has_mode() -> bool:
    """Return whether a mode sees each operator, and may replace its result."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


def is_observed() -> bool:
    """Return whether a mode or a profiler sees each operator, so that kernels must be called as operators."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )
