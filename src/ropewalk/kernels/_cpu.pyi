# The compiled kernels (csrc/binding.cpp). Addresses are Tensor.data_ptr(), strides count elements; nothing is checked.
# `tensors`: address in, address out, shape, strides in, strides out; of q, and of k if there is one.

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ropewalk._layout import Layout

def levels() -> list[str]:
    """The instruction sets that this machine can run, the fastest last."""

def use_level(name: str) -> None:
    """Run the kernels of this instruction set from now on; for tests and measurements."""

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
    back: bool,
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
    torch: ModuleType, layouts: Mapping[Layout, object], watchers: tuple[Callable[[], object], ...], /
) -> bool:
    """Prepare the functions below, which ask `watchers` each time; False where PyTorch has no exchange API."""

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
    """What `Rotation.__call__` returns, True in place, checks included. None where something is not usual: not a plain
    tensor on the CPU, a gradient, a transform, a mode, a shape that does not fit. Nothing was done then.
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
    """q and k, normed where there are weights, and rotated; with v and what follows, both are written to the caches and
    q alone is returned. None where something is not usual, and nothing was done then.
    """

def angles_plain(positions: object, steps: bytes, factor: float, dtype: object, axis: bytes, axes: int, /) -> Any:
    """cos and sin of int64 positions and steps, the bytes of int64 numbers; None where something is not usual.

    axis: which of the `axes` rows of positions each step takes, as steps; b"" and 0 where there are no rows.
    """
