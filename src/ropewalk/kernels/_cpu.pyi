# The compiled kernels (csrc/binding.cpp). Addresses are those of Tensor.data_ptr(); strides count elements. Only sizes
# are checked. `tensors` holds five entries for q, and five for k if present: the input and output addresses, the shape,
# and the input and output strides.

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ropewalk._layout import Layout

def levels() -> list[str]:
    """The instruction sets that this machine can run, in increasing order of speed."""

def use_level(name: str) -> None:
    """Use the kernels of this instruction set from now on; for tests and benchmarks."""

def use_openmp(parallel: int, thread_num: int, num_threads: int) -> None:
    """Set the addresses of OpenMP's functions. Until then the calling thread rotates alone."""

def rotate(
    tensors: tuple[object, ...],
    cos: int,
    sin: int,
    table_shape: Sequence[int],
    cos_strides: Sequence[int],
    sin_strides: Sequence[int],
    dtype: int,
    table_dtype: int,
    layout: tuple[int | None, int, int, int],
    interleaved: bool,
    offset: int,
    inverse: bool,
    threads: int,
    /,
) -> None: ...
def table_gradient(
    tensors: tuple[object, ...],
    d_cos: int,
    d_sin: int,
    table_shape: Sequence[int],
    dtype: int,
    layout: tuple[int | None, int, int, int],
    interleaved: bool,
    offset: int,
    threads: int,
    /,
) -> None: ...
def angles(
    positions: int,
    rows: int,
    axis: int,
    axes: int,
    steps: int,
    pairs: int,
    factor: float,
    dtype: int,
    cos: int,
    sin: int,
    threads: int,
    /,
) -> None: ...
def use_torch(
    torch: ModuleType, layouts: Mapping[Layout, object], observers: tuple[Callable[[], object], ...], /
) -> bool:
    """Prepare the functions below, which ask `observers` at each call. False if PyTorch has no exchange API."""

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
    in_place: bool,
    /,
) -> Any:
    """Check and rotate; returns what `Rotation.__call__` returns, or True in place.

    Returns None, having done nothing, for anything uncommon: a tensor that is not a plain CPU tensor, a gradient, a
    transform, a mode, or a shape that does not fit.
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
    q_weight: object,
    k_weight: object,
    eps: float,
    add_one: bool,
    v: object,
    k_cache: object,
    v_cache: object,
    slots: object,
    profiled: bool,
    /,
) -> Any:
    """Normalize q and k if there are weights, and rotate them.

    With v, the caches and slots, k and v are written to the caches and only q is returned. Returns None, having done
    nothing, for anything uncommon, as `rotate_plain` does.
    """

def angles_plain(positions: object, steps: bytes, factor: float, dtype: object, axis: bytes, axes: int, /) -> Any:
    """cos and sin of int64 positions and steps. Returns None, having done nothing, for anything uncommon.

    `steps` and `axis` are the bytes of int64 numbers. `axis` holds the row of positions for each step, one of `axes`
    rows; it is b"", and `axes` 0, if positions have no rows.
    """
