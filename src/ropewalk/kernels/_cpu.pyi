# The compiled kernels (csrc/binding.cpp). They check sizes and dtypes, and call the kernels with views of the tensors.

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from ropewalk._layout import Layout

def levels() -> list[str]:
    """Return the names of the instruction sets that this machine can run, in increasing order of speed."""

def use_level(name: str) -> None:
    """Select the kernels of an instruction set for all later calls, in tests and benchmarks."""

def use_openmp(parallel: int, thread_num: int, num_threads: int) -> None:
    """Set the addresses of OpenMP's functions. Before this call, only the calling thread rotates."""

def use_torch(
    torch: ModuleType, layouts: Mapping[Layout, object], observers: tuple[Callable[[], object], ...], /
) -> bool:
    """Prepare the functions below. Return False if PyTorch has no exchange API.

    Each later call asks all observers, and is left to Python if one of them returns a true value.
    """

def rotate(
    tensors: list[Tensor],
    outputs: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: tuple[int | None, int, int, int],
    interleaved: bool,
    offset: int,
    inverse: bool,
    /,
) -> None:
    """Rotate q, or q and k, into the outputs. Raise RopeError if a size or dtype does not match."""

def table_gradient(
    tensors: list[Tensor],
    grads: list[Tensor],
    d_cos: Tensor,
    d_sin: Tensor,
    layout: tuple[int | None, int, int, int],
    interleaved: bool,
    offset: int,
    /,
) -> None:
    """Write the gradients of cos and sin, given q and k and the gradients of what they are rotated to."""

def angles(positions: Tensor, axis: Tensor | None, steps: Tensor, factor: float, cos: Tensor, sin: Tensor, /) -> None:
    """Write cos and sin of int64 positions `[..., tokens]`, or with `axis`, the axis of each pair, `[axes, ...]`."""

def rotate_plain(
    q: object,
    k: object,
    cos: object,
    sin: object,
    layout: object,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    offset: int,
    per_head: bool,
    in_place: bool,
    /,
) -> Any:
    """Check the arguments and rotate. Return the result of `Rotation.__call__`, or True if `in_place`.

    Return None, without any effect, if the call must be left to Python: for a tensor that is not a plain CPU tensor, a
    gradient, a transform, a mode, or a shape that does not match.
    """

def step_plain(
    q: object,
    k: object,
    cos: object,
    sin: object,
    layout: object,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    offset: int,
    per_head: bool,
    q_weight: object,
    k_weight: object,
    eps: float,
    add_one: bool,
    v: object,
    k_cache: object,
    v_cache: object,
    slots: object,
    k_scales: object,
    v_scales: object,
    profiled: bool,
    /,
) -> Any:
    """Normalize q and k if weights are passed, and rotate them. Return both.

    If the members of `StoreArguments` are passed, k and v are written to the caches and only q is returned. Return
    None, without any effect, if the call must be left to Python, as `rotate_plain` does.
    """

def attend_plain(
    q: object,
    far_q: object,
    keys: object,
    values: object,
    blocks: object,
    count: int,
    order: object,
    counts: object,
    window: int,
    sinks: int,
    key_scales: object,
    value_scales: object,
    ring: int,
    scale: float,
    profiled: bool,
    /,
) -> Any:
    """Attend over keys and values `[block, slot, kv_head, channel]` where they are.

    The arguments are those of `VisibleKeys`; window 0 means no limit. Return None, without any effect, if the call must
    be left to Python, as `rotate_plain` does.
    """

def angles_plain(positions: object, steps: bytes, factor: float, dtype: object, axis: bytes, axes: int, /) -> Any:
    """Return cos and sin of int32 or int64 positions and int64 steps, or None if the call must be left to Python.

    `steps` and `axis` are the bytes of int64 numbers. `axis` holds the row of positions for each step, one of `axes`
    rows; it is b"", and `axes` 0, if positions have no rows.
    """
