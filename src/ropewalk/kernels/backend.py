"""The table of backends, the protocol that they implement, and the choice between them and plain PyTorch.

To add a backend, write a module with the functions of `Kernels`, and add a line to `KERNELS`.

The environment variable ROPEWALK_BACKEND is read once, at import. Unset or empty, it means "auto":

- "auto" uses the compiled kernels wherever they apply, and plain PyTorch elsewhere.
- "reference" uses plain PyTorch everywhere.
- "kernel" raises an error wherever no kernel applies.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error
from ropewalk._layout import Options
from ropewalk.kernels import cpu, gpu
from ropewalk.kernels.observed import must_trace

if TYPE_CHECKING:
    from ropewalk.kernels.visible import StoreArguments, VisibleKeys

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

    @property
    def device_name(self) -> str:
        """What people call the device, for messages."""

    def unavailable(self, device: torch.device | None = None) -> str | None:
        """Return why the kernels cannot be used on a device, or None if they can.

        Args:
            device: a device of this kind. None means the default one.
        """

    def version(self) -> str:
        """Return a description of these kernels. They must be available."""

    def rotate(self, tensors: list[Tensor], outputs: list[Tensor], cos: Tensor, sin: Tensor, options: Options) -> None:
        """Rotate the tensors into `outputs`, which may be the tensors themselves.

        Args:
            tensors: q, or q and k, in the layout of `options`. They differ at most in the number of heads.
            outputs: one tensor for each of `tensors`, with the same shape and dtype.
            cos, sin: `[pairs]`, `[seq, pairs]`, `[batch, seq, pairs]`, or per head `[batch, heads, seq, pairs]`. The
                size of batch is 1 if all sequences share the table or the layout has no batch axis.
        """

    def table_gradient(
        self, tensors: list[Tensor], grads: list[Tensor], pairs: int, options: Options, per_head: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a rotation with respect to cos and sin.

        They are summed over the tensors and over heads that share a table.

        Args:
            tensors: the tensors before the rotation.
            grads: the gradients with respect to the rotated tensors.
            pairs: number of rotated pairs.
            options: those of the rotation, with `inverse` False.
            per_head: whether each head has its own table.

        Returns:
            Two tensors `[batch, seq, pairs]`, per head `[batch, heads, seq, pairs]`; float64 for float64 tensors, else
            float32.
        """

    def angles(
        self, positions: Tensor, phase_steps: Tensor, factor: float, dtype: torch.dtype, axis: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of position · phase step for every position and pair, multiplied by `factor`.

        Args:
            positions: int32 or int64 of any shape, one position for each token; `[axes, ...]` if each token has several
                positions, such as the row and the column of an image patch.
            phase_steps: int64 `[pairs]`, the rotation of each pair per position, in 2⁻⁶⁴ turns.
            factor: the attention factor, dimensionless.
            dtype: dtype of the result, torch.float32 or torch.float64.
            axis: int64 `[pairs]`. Pair i uses the positions in row `positions[axis[i]]`. None if each token has one
                position, which all pairs use.

        Returns:
            Two tensors of shape `positions.shape + (pairs,)`. If `axis` is passed, the shape is that of one row,
            `positions.shape[1:] + (pairs,)`.
        """

    @property
    def step(self) -> FusedStep | None:
        """The fused step, or None if these kernels have none that can be called like `FusedStep`."""

    @property
    def attend(self) -> CachedAttention | None:
        """Attention over a cache, or None if these kernels have none that can be called like `CachedAttention`."""


class FusedStep(Protocol):
    """Normalize and rotate q and k into new tensors, and write k and v to a cache, in one kernel."""

    def __call__(
        self,
        tensors: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        options: Options,
        norm: tuple[Tensor, Tensor, float, bool] | None,
        store: StoreArguments | None,
    ) -> None:
        """Do the step.

        Args:
            tensors: q and k, in the layout of `options`.
            outputs: the output for q and the output for k. With `store`, the latter is the cache of keys,
                `[blocks, block_size, kv_heads, head_dim]`.
            cos, sin: `[pairs]`, `[seq, pairs]` or `[batch, seq, pairs]`.
            options: with `inverse` False.
            norm: the contiguous weights of q and k, ε, and whether 1 is added to the weights. None skips the norm.
            store: v, the caches and the slots. None writes to no cache.
        """


class CachedAttention(Protocol):
    """Attend over the visible keys of a cache, without reading other keys and without waiting for the device."""

    def __call__(
        self, q: Tensor, far_q: Tensor | None, keys: Tensor, values: Tensor, visible: VisibleKeys, scale: float
    ) -> Tensor | None:
        """Return the attended values, or None for heads that are too large or values that are not as wide as keys.

        Args:
            q, far_q, keys, values, scale: as in `attention.few_tokens.attend_cached`.
            visible: the keys. Every block exists, and `visible.keys` is at most the number of slots of a row.
        """


KERNELS: dict[str, Kernels] = {"cpu": cpu, "cuda": gpu}
"""Maps the type of a device to its kernels. "cuda" includes AMD GPUs."""

FAST_PATH = BACKEND != "reference" and cpu.FAST_PATH
"""Whether C++ runs the whole of a common call on the CPU, including the checks."""

_NO_FLOAT64 = frozenset({"mps"})


def has_float64(device: torch.device) -> bool:
    """Return whether PyTorch computes in float64 on the device."""
    return device.type not in _NO_FLOAT64


def kernel_for(*tensors: Tensor) -> Kernels | None:
    """Return the kernels that can process these tensors, or None if plain PyTorch must be used.

    Kernels take plain tensors on one device, outside of transforms.

    Raises:
        RopeError: no kernels apply, and ROPEWALK_BACKEND is "kernel".
    """
    if BACKEND != "reference" and not must_trace():
        on_cpu = tensors[0].is_cpu  # faster than comparing devices
        device = None if on_cpu else tensors[0].device
        for x in tensors:
            # If a tensor has the negative bit (`z.conj().imag`), its memory holds the values with the opposite sign.
            # PyTorch's efficient zero tensors, such as the gradient of torch.sgn, have no memory.
            if type(x) not in PLAIN or x.is_cpu is not on_cpu or x.is_neg() or x._is_zerotensor():
                break
            if device is not None and x.device != device:
                break
        else:
            kernels = KERNELS.get("cpu" if device is None else device.type)
            if kernels is not None:
                if kernels.unavailable(device) is None:
                    return kernels
                if on_cpu and tensors[0].is_floating_point():  # a rotation; positions are integers
                    _warn_once()
    if BACKEND == "kernel":
        raise no_kernel_error(tensors[0])
    return None


# A copy of the package in a kernel of the hub (tools/hub_kernel.py) lacks the CPU kernel by intention.
_has_warned = BACKEND != "auto" or not __name__.startswith("ropewalk.")


def _warn_once() -> None:
    """Warn at the first rotation on the CPU that the kernel is missing, because pip shows nothing of the build."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"ropewalk's CPU kernel is not usable ({cpu.unavailable()}), so rotations on the CPU run in plain PyTorch, "
            "which is slower. Install ropewalk again with a compiler, or set ROPEWALK_BACKEND=reference to use plain "
            "PyTorch without this warning.",
            stacklevel=2,
        )


def no_kernel_error(x: Tensor) -> RopeError:
    """Create the error for a tensor that no kernel can process, although one must."""
    who, kernels = "ROPEWALK_BACKEND=kernel", KERNELS.get(x.device.type)
    if kernels is not None and (reason := kernels.unavailable(x.device)) is not None:
        must = f"the {kernels.device_name} kernel must be available"
        return error(who, must, reason, "Install what is missing, or unset the variable.")
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

    Examples:
        >>> import ropewalk
        >>> print(ropewalk.backends()["reference"])
        usable on every device (plain PyTorch)
    """
    states = {"reference": "usable on every device (plain PyTorch)"}
    for kernels in KERNELS.values():
        reason = kernels.unavailable()
        disabled = f", but ROPEWALK_BACKEND is {BACKEND}" if BACKEND == "reference" else ""
        usable = f"not usable: {reason}" if reason is not None else f"usable: {kernels.version()}{disabled}"
        states[f"{kernels.device_name.lower()} kernel"] = usable
    return states
