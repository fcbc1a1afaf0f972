"""Which code runs: the compiled kernels wherever they can, or what ROPEWALK_BACKEND says.

The variable is read once: "auto", the default; "reference": plain PyTorch throughout; "kernel": an error wherever
there is a kernel and it cannot be used.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ropewalk._checks import error
from ropewalk.kernels import cpu

BACKEND = os.environ.get("ROPEWALK_BACKEND", "auto")
if BACKEND not in ("auto", "reference", "kernel"):
    raise error(
        "ROPEWALK_BACKEND", "it must be one of 'auto', 'reference', 'kernel'", repr(BACKEND), "Unset it for auto."
    )
if BACKEND == "kernel" and cpu.why_not:
    raise error("ROPEWALK_BACKEND=kernel", "the CPU kernel must be there", cpu.why_not, "Install again, or unset it.")

_PLAIN = (Tensor, torch.nn.Parameter)
_USES_CPU = BACKEND != "reference" and not cpu.why_not


def must_be_seen() -> bool:
    """Whether PyTorch must see the operators inside, since it makes something else of them than their result."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def cpu_takes(*tensors: Tensor) -> bool:
    """Whether the CPU kernel can do it: plain tensors on the CPU, and no transform that must look inside.

    Raises:
        RopeError: it cannot, and ROPEWALK_BACKEND asks for it.
    """
    takes = _USES_CPU and not must_be_seen()
    for x in tensors:
        # Negative: the minus sign is a flag, and the memory says something else (`z.conj().imag`).
        takes = takes and type(x) in _PLAIN and x.is_cpu and not x.is_neg()
    if BACKEND == "kernel" and not takes:
        x = tensors[0]
        raise error(
            "ROPEWALK_BACKEND=kernel",
            "there must be plain tensors on the CPU, and no transform, compilation or export",
            f"{type(x).__name__} on {x.device}",
            "Set it to auto.",
        )
    return takes


def backends() -> dict[str, str]:
    """Which code can turn here: name → "usable ..." or "not usable: " and why; and what ROPEWALK_BACKEND says of it.

    Example:
        >>> import ropewalk
        >>> print(ropewalk.backends()["reference"])
        usable on every device (plain PyTorch)
    """
    said = f", but ROPEWALK_BACKEND is {BACKEND}" if BACKEND == "reference" else ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none found"
    return {
        "reference": "usable on every device (plain PyTorch)",
        "cpu kernel": f"not usable: {cpu.why_not}" if cpu.why_not else f"usable: {cpu.level()}{said}",
        "gpu kernel": f"not usable: this release has none (GPU: {gpu})",
    }
