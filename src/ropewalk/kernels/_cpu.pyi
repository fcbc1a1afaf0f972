# The compiled kernels (csrc/binding.cpp). Addresses are Tensor.data_ptr(), strides count elements; nothing is checked.
# `tensors`: address in, address out, shape, strides in, strides out; of q, and of k if there is one.

from collections.abc import Sequence

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
    steps: int,
    pairs: int,
    factor: float,
    dtype: int,
    cos: int,
    sin: int,
    threads: int,
    /,
) -> None: ...
