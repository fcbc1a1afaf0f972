"""Which code runs: the compiled kernels wherever they can, or what ROPEWALK_BACKEND says; and what kernels are.

The variable is read once: "auto", the default; "reference": plain PyTorch throughout; "kernel": an error wherever
it cannot be a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error
from ropewalk._dtensor import is_dtensor
from ropewalk._layout import Layout
from ropewalk.kernels import cpu, gpu

BACKEND = os.environ.get("ROPEWALK_BACKEND", "auto")
if BACKEND not in ("auto", "reference", "kernel"):
    raise error(
        "ROPEWALK_BACKEND", "it must be one of 'auto', 'reference', 'kernel'", repr(BACKEND), "Unset it for auto."
    )

PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose elements lie in memory, at the addresses that strides give. A subclass may be anything."""


class Kernels(Protocol):
    """The compiled kernels of one kind of device: a module such as `cpu` and `gpu`. They are given checked tensors."""

    def unavailable(self, device: torch.device | None = None) -> str | None:
        """Why they cannot be used on this device, the usual one of their kind when None; None where they can."""

    def rotate(
        self,
        tensors: list[Tensor],
        outputs: list[Tensor],
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        interleaved: bool,
        rotary_offset: int,
        back: bool,
    ) -> None:
        """Write the tensors, rotated, to `outputs`, which may be the tensors themselves.

        Args:
            tensors: one or two with all but the number of heads in common, in `layout`.
            cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`, with
                batch 1 where it is the same for all, or where there is none.
            back: rotate by minus the angle.
        """

    def table_gradient(
        self,
        tensors: list[Tensor],
        grads: list[Tensor],
        pairs: int,
        layout: Layout,
        interleaved: bool,
        rotary_offset: int,
        per_head: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The gradient to cos and sin of `rotate`, summed over tensors and, but for tables per head, over heads.

        Returns:
            Two tensors `[batch, seq, pairs]`, per head `[batch, heads, seq, pairs]`; float64 for float64 tensors, else
            float32.
        """

    def angles(
        self, positions: Tensor, steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of int32 or int64 positions times int64 steps, in 2⁻⁶⁴ turns; times `factor`.

        Args:
            axis: the row of positions that each step takes, int64; None: every step takes all of them.
        """


CPU: Kernels = cpu
GPU: Kernels = gpu
_USES_CPU = BACKEND != "reference" and CPU.unavailable() is None
AT_ONCE = _USES_CPU and cpu.AT_ONCE
"""Whether compiled code takes the whole of a usual call on the CPU, checks included."""


def must_be_seen() -> bool:
    """Whether PyTorch must see the operators inside, since it makes something else of them than their result."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def kernel_for(*tensors: Tensor) -> Kernels | None:
    """The kernels that can do it; None where plain PyTorch must.

    They take plain tensors of one device, where no transform must look inside. Of DTensors, those of their shards.

    Raises:
        RopeError: none can, and ROPEWALK_BACKEND asks for it.
    """
    kernel = None if must_be_seen() else _of(tensors)
    if BACKEND == "kernel" and kernel is None:
        raise _no_kernel(tensors[0])
    return kernel


def _of(tensors: tuple[Tensor, ...]) -> Kernels | None:
    on_cpu = tensors[0].is_cpu
    for x in tensors:
        # Negative: the minus sign is a flag, and the memory says something else (`z.conj().imag`). Zero: PyTorch's
        # efficient zero tensors, such as the gradient of torch.sgn, have no memory.
        if type(x) not in PLAIN or x.is_cpu is not on_cpu or x.is_neg() or x._is_zerotensor():
            return (
                _of(tuple(x._local_tensor for x in tensors if is_dtensor(x))) if all(map(is_dtensor, tensors)) else None
            )
    if on_cpu:
        return CPU if _USES_CPU else None
    if not tensors[0].is_cuda or BACKEND == "reference":
        return None
    return GPU if GPU.unavailable(tensors[0].device) is None else None


def _no_kernel(x: Tensor) -> RopeError:
    who = "ROPEWALK_BACKEND=kernel"
    if x.is_cpu and (why := CPU.unavailable(x.device)) is not None:
        return error(who, "the CPU kernel must be there", why, "Install again, or unset it.")
    if x.is_cuda and (why := GPU.unavailable(x.device)) is not None:
        return error(who, "the GPU kernel must be there", why, "Unset it, or pass tensors that the kernel can rotate.")
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
    return {
        "reference": "usable on every device (plain PyTorch)",
        "cpu kernel": _state(CPU, cpu.level),
        "gpu kernel": _state(GPU, gpu.version),
    }


def _state(kernels: Kernels, which: Callable[[], str]) -> str:
    why = kernels.unavailable()
    if why is not None:
        return f"not usable: {why}"
    said = f", but ROPEWALK_BACKEND is {BACKEND}" if BACKEND == "reference" else ""
    return f"usable: {which()}{said}"
