"""Which code runs: the compiled kernels wherever they can, or what ROPEWALK_BACKEND says.

The variable is read once: "auto", the default; "reference": plain PyTorch throughout; "kernel": an error wherever
it cannot be a kernel.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error
from ropewalk.kernels import cpu, gpu

BACKEND = os.environ.get("ROPEWALK_BACKEND", "auto")
if BACKEND not in ("auto", "reference", "kernel"):
    raise error(
        "ROPEWALK_BACKEND", "it must be one of 'auto', 'reference', 'kernel'", repr(BACKEND), "Unset it for auto."
    )

PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose elements lie in memory, at the addresses that strides give. A subclass may be anything."""
_USES_CPU = BACKEND != "reference" and not cpu.why_not


def must_be_seen() -> bool:
    """Whether PyTorch must see the operators inside, since it makes something else of them than their result."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def kernel_for(*tensors: Tensor) -> Any:
    """The module, `cpu` or `gpu`, whose kernels can do it; None where plain PyTorch must.

    They take plain tensors of one device, where no transform must look inside.

    Raises:
        RopeError: none can, and ROPEWALK_BACKEND asks for it.
    """
    kernel = None if must_be_seen() else _of(tensors)
    if BACKEND == "kernel" and kernel is None:
        raise _no_kernel(tensors[0])
    return kernel


def _of(tensors: tuple[Tensor, ...]) -> Any:
    on_cpu = tensors[0].is_cpu
    for x in tensors:
        # Negative: the minus sign is a flag, and the memory says something else (`z.conj().imag`). Zero: PyTorch's
        # efficient zero tensors, such as the gradient of torch.sgn, have no memory.
        if type(x) not in PLAIN or x.is_cpu is not on_cpu or x.is_neg() or x._is_zerotensor():
            return None
    if on_cpu:
        return cpu if _USES_CPU else None
    return gpu if tensors[0].is_cuda and BACKEND != "reference" and not gpu.why_not(tensors[0].device) else None


def _no_kernel(x: Tensor) -> RopeError:
    who = "ROPEWALK_BACKEND=kernel"
    if x.is_cpu and cpu.why_not:
        return error(who, "the CPU kernel must be there", cpu.why_not, "Install again, or unset it.")
    if x.is_cuda and gpu.why_not(x.device):
        return error(who, "the GPU kernel must be there", gpu.why_not(x.device), "Mend that, or unset it.")
    return error(
        who,
        "there must be plain tensors on the CPU or a GPU, and no transform, compilation or export",
        f"{type(x).__name__} on {x.device}",
        "Set it to auto.",
    )


def backends() -> dict[str, str]:
    """Which code can turn here: name → "usable ..." or "not usable: " and why; and what ROPEWALK_BACKEND says of it.

    Example:
        >>> import ropewalk
        >>> print(ropewalk.backends()["reference"])
        usable on every device (plain PyTorch)
    """
    said = f", but ROPEWALK_BACKEND is {BACKEND}" if BACKEND == "reference" else ""
    return {
        "reference": "usable on every device (plain PyTorch)",
        "cpu kernel": f"not usable: {cpu.why_not}" if cpu.why_not else f"usable: {cpu.level()}{said}",
        "gpu kernel": f"not usable: {gpu.why_not()}" if gpu.why_not() else f"usable: {gpu.version()}{said}",
    }
