"""Choose between the compiled kernels and plain PyTorch, and define the protocol that the kernels implement.

The environment variable ROPEWALK_BACKEND is read once, at import. Unset or empty, it means "auto":

- "auto" uses the compiled kernels wherever they apply, and plain PyTorch elsewhere.
- "reference" uses plain PyTorch everywhere.
- "kernel" raises an error wherever no kernel applies.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error
from ropewalk._dtensor import is_dtensor
from ropewalk._layout import Layout
from ropewalk.kernels import cpu, gpu

BACKEND = os.environ.get("ROPEWALK_BACKEND") or "auto"
if BACKEND not in ("auto", "reference", "kernel"):
    raise error(
        "ROPEWALK_BACKEND",
        "the variable must be one of 'auto', 'reference', 'kernel'",
        repr(BACKEND),
        "Unset it to use auto.",
    )

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of plain tensors, whose elements are in memory at the addresses that their strides determine. A subclass
may store its elements differently."""


class Kernels(Protocol):
    """The compiled kernels of one kind of device: the modules `cpu` and `gpu`. Callers must check the tensors."""

    def unavailable(self, device: torch.device | None = None) -> str | None:
        """Return why the kernels cannot be used on a device, or None if they can.

        Args:
            device: the device. None means the default device of this kind.
        """

    def rotate(
        self,
        tensors: list[Tensor],
        outputs: list[Tensor],
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        interleaved: bool,
        rotary_offset: int,
        inverse: bool,
    ) -> None:
        """Rotate the tensors into `outputs`, which may be the tensors themselves.

        Args:
            tensors: q, or q and k, in `layout`. They differ at most in the number of heads.
            outputs: one tensor for each of `tensors`, with the same shape and dtype.
            cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`. The
                size of batch is 1 if all sequences share the table or the layout has no batch axis.
            layout: order of the axes of the tensors.
            interleaved: whether channels 2i and 2i + 1 form a pair. If not, channels i and i + pairs do.
            rotary_offset: the first rotated channel.
            inverse: whether to rotate by minus the angle.
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
        """Return the gradients of a rotation with respect to cos and sin.

        They are summed over the tensors and over heads that share a table.

        Args:
            tensors: the tensors before the rotation.
            grads: the gradients with respect to the rotated tensors.
            pairs: number of rotated pairs.
            layout, interleaved, rotary_offset: as for `rotate`.
            per_head: whether each head has its own table.

        Returns:
            Two tensors `[batch, seq, pairs]`, per head `[batch, heads, seq, pairs]`; float64 for float64 tensors, else
            float32.
        """

    def angles(
        self, positions: Tensor, steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of position · step for every position and pair, multiplied by `factor`.

        Args:
            positions: int32 or int64 of any shape, one position for each token; `[axes, ...]` if each token has several
                positions, such as the row and the column of an image patch.
            steps: int64 `[pairs]`, the rotation of each pair per position, in 2⁻⁶⁴ turns.
            factor: the attention factor, dimensionless.
            dtype: dtype of the result, torch.float32 or torch.float64.
            axis: int64 `[pairs]`. Pair i uses the positions in row `positions[axis[i]]`. None if each token has one
                position, which all pairs use.

        Returns:
            Two tensors of shape `positions.shape + (pairs,)`. If `axis` is passed, the shape is that of one row,
            `positions.shape[1:] + (pairs,)`.
        """


CPU: Kernels = cpu
GPU: Kernels = gpu
_USES_CPU = BACKEND != "reference" and CPU.unavailable() is None
FAST_PATH = _USES_CPU and cpu.FAST_PATH
"""Whether compiled code runs the whole of a common call on the CPU, including the checks."""


def needs_tracing() -> bool:
    """Return whether this call runs in a transform, forward-mode AD or compilation, where kernels cannot be used."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def kernel_for(*tensors: Tensor) -> Kernels | None:
    """Return the kernels that can process these tensors, or None if plain PyTorch must be used.

    Kernels take plain tensors on one device, outside of transforms. For DTensors, the result is the kernels that can
    process their shards.

    Raises:
        RopeError: no kernels apply, and ROPEWALK_BACKEND is "kernel".
    """
    kernel = None if needs_tracing() else _find_kernel(tensors)
    if BACKEND == "kernel" and kernel is None:
        raise _no_kernel_error(tensors[0])
    return kernel


def _find_kernel(tensors: tuple[Tensor, ...]) -> Kernels | None:
    on_cpu = tensors[0].is_cpu
    for x in tensors:
        # If a tensor has the negative bit (`z.conj().imag`), its memory holds the values with the opposite sign.
        # PyTorch's efficient zero tensors, such as the gradient of torch.sgn, have no memory.
        if type(x) not in PLAIN or x.is_cpu is not on_cpu or x.is_neg() or x._is_zerotensor():
            return (
                _find_kernel(tuple(x._local_tensor for x in tensors if is_dtensor(x)))
                if all(map(is_dtensor, tensors))
                else None
            )
    if on_cpu:
        if not _USES_CPU and tensors[0].is_floating_point():  # a rotation; angles have integer positions
            _warn_once()
        return CPU if _USES_CPU else None
    if not tensors[0].is_cuda or BACKEND == "reference":
        return None
    return GPU if GPU.unavailable(tensors[0].device) is None else None


_has_warned = BACKEND != "auto"


def _warn_once() -> None:
    """Warn at the first rotation on the CPU that the kernel is missing, because pip shows nothing of the build."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"ropewalk's CPU kernel is not usable ({CPU.unavailable()}), so rotations on the CPU run in plain PyTorch, "
            "which is slower. Install ropewalk again with a compiler, or set ROPEWALK_BACKEND=reference to use plain "
            "PyTorch without this warning.",
            stacklevel=2,
        )


def _no_kernel_error(x: Tensor) -> RopeError:
    who = "ROPEWALK_BACKEND=kernel"
    if x.is_cpu and (reason := CPU.unavailable(x.device)) is not None:
        return error(who, "the CPU kernel must be available", reason, "Reinstall ropewalk, or unset the variable.")
    if x.is_cuda and (reason := GPU.unavailable(x.device)) is not None:
        fix = "Unset the variable, or pass tensors that the kernel can rotate."
        return error(who, "the GPU kernel must be available", reason, fix)
    return error(
        who,
        "tensors must be plain tensors on the CPU or a GPU, outside of transforms, compilation and export",
        f"{type(x).__name__} on {x.device}",
        "Set the variable to auto.",
    )


def backends() -> dict[str, str]:
    """Return which implementations of the rotation can run on this machine.

    Returns:
        A dict with the keys "reference", "cpu kernel" and "gpu kernel". Each value begins with "usable", or is
        "not usable: " followed by the reason. A value says so if ROPEWALK_BACKEND disables a usable kernel.

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


def _state(kernels: Kernels, describe: Callable[[], str]) -> str:
    reason = kernels.unavailable()
    if reason is not None:
        return f"not usable: {reason}"
    disabled = f", but ROPEWALK_BACKEND is {BACKEND}" if BACKEND == "reference" else ""
    return f"usable: {describe()}{disabled}"
