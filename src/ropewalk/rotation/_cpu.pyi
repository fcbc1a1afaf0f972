# The compiled kernels (csrc/binding.cpp). Addresses are Tensor.data_ptr(), strides count elements; nothing is checked.

def levels() -> dict[str, int]:
    """The instruction sets that this machine can run, by name, the fastest last."""

def scale(
    inp: int,
    out: int,
    rows: int,
    columns: int,
    inp_stride: int,
    out_stride: int,
    factor: float,
    level: int,
    threads: int,
    /,
) -> None: ...
