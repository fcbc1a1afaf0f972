"""Compute cos and sin from positions and phase steps. This is the only module that decides their precision.

    phase = position · phase step        int64; wraparound reduces modulo one turn without rounding

- Plain tensors on the CPU or a GPU use the compiled kernels, which evaluate polynomials in float64. Code compiled for a
  GPU calls them through the operator `ropewalk::angles`.
- Tensors that the kernels do not support use PyTorch's cos and sin of the phase in float64, rounded once.
- On devices without float64, the top two bits of the phase give the quadrant, and float32 polynomials give cos and sin
  of the residual, which is within an eighth of a turn. `torch.cos` is not used there: under torch.compile it is off by
  1.1e-7, and on GPUs it is slow.
- Fractional positions (image grids) are multiplied by the frequencies in float64.
- `cos_sin_as_deployed` computes in float32 instead, as deployed code does.

If each token has several positions, one for each axis, each pair uses the position on its own axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.compiler import is_dynamo_compiling

from ropewalk import _checks
from ropewalk.angles.phase_steps import device_copy, ensure_on_device
from ropewalk.kernels import backend, cpu

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)

_CPU = torch.device("cpu")

_RADIANS_PER_UNIT = 2 * math.pi / 2**64


def check_positions(positions: Tensor, axes: int | None) -> None:
    """Raise unless positions are a tensor of a suitable shape, in a dtype that represents positions exactly.

    Args:
        axes: the number of positions per token, for shapes `[axes, seq]` and `[axes, batch, seq]`. None for shapes
            `[seq]` and `[batch, seq]`.
    """
    who = "Rope.at"
    if not isinstance(positions, Tensor):
        raise _checks.error(
            who, "positions must be a tensor", _checks.shown(positions), "Pass torch.arange(seq) or torch.tensor(...)."
        )
    if positions.dtype not in _INTEGERS + _FLOATS:
        raise _checks.error(
            who,
            "positions must be int32 or int64 (float32 or float64 for grids)",
            str(positions.dtype),
            "Keep positions out of .half(), .bfloat16() and autocast: bfloat16 cannot separate neighbours beyond 256.",
        )
    if axes is None and positions.ndim not in (1, 2):
        raise _checks.error(
            who,
            "positions must have shape [seq] or [batch, seq]",
            f"shape {tuple(positions.shape)}",
            "If tokens have several positions (M-RoPE, images), build the Rope with axes.",
        )
    if axes is not None and (positions.ndim not in (2, 3) or positions.shape[0] != axes):
        raise _checks.error(
            who,
            f"positions of a rope with axes must have shape [{axes}, seq] or [{axes}, batch, seq]",
            f"shape {tuple(positions.shape)}",
            _fix_for_shape(positions, axes),
        )


def _fix_for_shape(positions: Tensor, axes: int) -> str:
    """Return the fix to suggest for a wrong shape. A common mistake is to pass the axes last, as in diffusers."""
    if positions.ndim in (2, 3) and positions.shape[-1] == axes:
        permuted = "positions.T" if positions.ndim == 2 else "positions.permute(2, 0, 1)"
        return f"The axes must come first: pass {permuted}."
    return f"Pass one row per axis. For text, all rows are equal: positions.expand({axes}, *positions.shape)."


def delta_tensor(delta: int | tuple[int, ...] | Tensor, device: torch.device | str | None, axes: int | None) -> Tensor:
    """Check a shift and return it as an integer tensor: a tensor unchanged, an int as `[]`, a tuple as `[axes]`."""
    who = "Rope.shift"
    if isinstance(delta, Tensor):
        fits = delta.ndim <= 2 if axes is None else 1 <= delta.ndim <= 3 and delta.shape[0] == axes
        if delta.dtype not in _INTEGERS or not fits:
            shapes = "[], [seq] or [batch, seq]" if axes is None else f"[{axes}], [{axes}, seq] or [{axes}, batch, seq]"
            raise _checks.error(
                who,
                f"delta must be {'an int' if axes is None else 'a tuple of ints'} or an int32 or int64 tensor {shapes}",
                _checks.describe(delta),
                f"Pass the number of tokens by which each key moves{'' if axes is None else ', along each axis'}.",
            )
        return delta
    if axes is None:
        return _scalar_tensor(delta, "delta", device)
    if not isinstance(delta, tuple) or len(delta) != axes:
        must, fix = (
            f"delta of a rope with {axes} axes must be a tuple of {axes} ints",
            "For text, all of them are equal.",
        )
        raise _checks.error(who, must, _checks.shown(delta), fix)
    return torch.stack([_scalar_tensor(along, f"delta[{i}]", device) for i, along in enumerate(delta)])


def _scalar_tensor(number: Any, name: str, device: torch.device | str | None) -> Tensor:
    _checks.integer("Rope.shift", name, number, at_least=-(2**63), at_most=2**63 - 1)
    # torch.full, because torch.tensor would copy to a GPU and synchronize.
    return torch.full((), number, dtype=torch.int64, device="cpu" if device is None else device)


def fast_path(
    positions: Tensor,
    phase_steps: bytes,
    factor: float,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    axis: bytes,
    axes: int,
) -> tuple[Tensor, Tensor] | None:
    """Check positions and compute cos and sin in C++ on the CPU. Return None if `cos_sin` must be used.

    Args:
        positions, factor, device, dtype: as for `cos_sin`. Nothing has been checked yet.
        phase_steps, axis: as for `cos_sin`, packed as the bytes of int64 numbers. An empty axis means that each token
            has one position.
        axes: number of positions of each token, or 0 if positions have no such axis.
    """
    elsewhere = device is not None and device != _CPU and device != "cpu"
    if not backend.FAST_PATH or elsewhere or is_dynamo_compiling():
        return None
    table_dtype = torch.float32 if dtype is None else dtype
    tables: tuple[Tensor, Tensor] | None = cpu.angles_plain(positions, phase_steps, factor, table_dtype, axis, axes)
    return tables


def cos_sin(
    positions: Tensor,
    phase_steps: tuple[int, ...],
    inv_freq: tuple[float, ...],
    factor: float,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    axis: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position and pair, multiplied by `factor`.

    Args:
        positions: int32, int64, float32 or float64 of any shape; `[axes, ...]` if each token has several positions.
        phase_steps: the rotation of each pair per position, in 2⁻⁶⁴ turns, signed (see `angles.fixed_point`).
        inv_freq: the rotation of each pair per position in radians, used for fractional positions.
        factor: the attention factor, dimensionless.
        device: device of the result. None means the device of positions.
        dtype: dtype of the result. None means torch.float32.
        axis: for each pair, the index of the axis whose position it uses. None if each token has one position.

    Returns:
        Two tensors of shape `positions.shape + (pairs,)`, without the leading `axes`.

    Raises:
        RopeError: dtype is not float32 or float64, or the computation needs float64 and the device lacks it.
    """
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in _FLOATS:
        raise _checks.error(
            "Rope.at",
            "dtype must be torch.float32 or torch.float64",
            str(dtype),
            "Tables in 16 bits lose the angle. q and k keep their own dtype in any case.",
        )
    positions = positions if device is None else positions.to(device)
    has_float64 = backend.has_float64(positions.device)
    if positions.dtype in _INTEGERS:
        # Not `is_exporting()`, which returns this flag: before 2.12, Dynamo takes the call for True in any compilation.
        if positions.is_cuda and torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag:
            for numbers in (phase_steps,) if axis is None else (phase_steps, axis):
                ensure_on_device(numbers, positions.device)
            tables: tuple[Tensor, Tensor] = torch.ops.ropewalk.angles(positions, phase_steps, factor, dtype, axis)
            return tables
        if has_float64:
            return _from_integers(positions, phase_steps, factor, dtype, axis)
        _require_float64(dtype == torch.float32, positions.device)
        phase = _positions_of_pairs(positions, axis).to(torch.int64) * device_copy(phase_steps, positions)
        return cos_sin_of_phase_float32(phase, factor)
    _require_float64(has_float64, positions.device)
    frequencies = torch.tensor(inv_freq, dtype=torch.float64, device=positions.device)
    return _cos_sin_rounded(_positions_of_pairs(positions, axis).to(torch.float64) * frequencies, factor, dtype)


def cos_sin_as_deployed(
    positions: Tensor,
    inv_freq: tuple[float, ...],
    factor: float,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    axis: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin as deployed code computes them: each operation is rounded to float32.

    The angle is the product of position and frequency. Its cos and sin are multiplied by `factor`.

    Source: `LlamaRotaryEmbedding.forward` in transformers.

    Args:
        positions: as in `cos_sin`; they are rounded to float32.
        inv_freq: radians per position of each pair, as values that float32 represents exactly.
        factor, device, axis: as in `cos_sin`.
        dtype: torch.float32 or None.

    Returns:
        Two float32 tensors of shape `positions.shape + (pairs,)`, without the leading `axes`.

    Raises:
        RopeError: dtype is neither torch.float32 nor None.
    """
    if dtype not in (None, torch.float32):
        raise _checks.error(
            "Rope.at",
            'dtype must be torch.float32 with numerics="float32"',
            str(dtype),
            'Omit dtype, or pass numerics="float32-frequencies" or "exact".',
        )
    positions = positions if device is None else positions.to(device)
    frequencies = torch.tensor(inv_freq, dtype=torch.float32, device=positions.device)
    angle = _positions_of_pairs(positions, axis).to(torch.float32) * frequencies
    return angle.cos() * factor, angle.sin() * factor


def _from_integers(
    positions: Tensor, phase_steps: tuple[int, ...], factor: float, dtype: torch.dtype, axis: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    copy = device_copy(phase_steps, positions)
    kernel = backend.kernel_for(positions, copy)
    if kernel is not None:
        return kernel.angles(positions, copy, factor, dtype, None if axis is None else device_copy(axis, positions))
    phase = _positions_of_pairs(positions, axis).to(torch.int64) * copy
    return _cos_sin_rounded(phase.to(torch.float64) * _RADIANS_PER_UNIT, factor, dtype)


def _positions_of_pairs(positions: Tensor, axis: tuple[int, ...] | None) -> Tensor:
    """Return the position that each pair uses, `[..., pairs]`, or one position for all pairs, `[..., 1]`."""
    if axis is None:
        return positions.unsqueeze(-1)
    return positions.index_select(0, device_copy(axis, positions)).movedim(0, -1)


# The operator takes the phase steps as numbers and caches their copy on the device, as eager calls do. If they were a
# constant tensor of the graph, every call would copy them to the GPU.
_library: Any = get_library_allowing_overwrite("ropewalk", "angles")  # as in rotation/ops.py
_library.define(
    "angles(Tensor positions, int[] phase_steps, float factor, ScalarType dtype, int[]? axis=None) -> (Tensor, Tensor)"
)


def _angles(
    positions: Tensor, phase_steps: list[int], factor: float, dtype: torch.dtype, axis: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Implement the operator, which any code may call, so it checks its arguments."""
    who, fix = "torch.ops.ropewalk.angles", "Use Rope.at."
    if positions.dtype not in _INTEGERS or dtype not in _FLOATS or not phase_steps:
        must = "positions must be int32 or int64, dtype float32 or float64, and phase_steps not empty"
        got = f"{positions.dtype}, {dtype} and {len(phase_steps)} phase steps"
        raise _checks.error(who, must, got, fix)
    rows = positions.shape[0] if positions.ndim else 0
    if axis is not None and (len(axis) != len(phase_steps) or not all(0 <= a < rows for a in axis)):
        must = "axis must name a row of positions for each phase step"
        got = f"{_checks.shown(axis)} for {len(phase_steps)} phase steps and {rows} rows"
        raise _checks.error(who, must, got, fix)
    cos, sin = _from_integers(positions, tuple(phase_steps), factor, dtype, None if axis is None else tuple(axis))
    return cos.contiguous(), sin.contiguous()  # without a kernel, their strides differ from those of `_angles_meta`


def _angles_meta(
    positions: Tensor, phase_steps: list[int], factor: float, dtype: torch.dtype, axis: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    shape = positions.shape[axis is not None :]
    cos, sin = (positions.new_empty((*shape, len(phase_steps)), dtype=dtype) for _ in range(2))
    return cos, sin


def _angles_vmap(
    info: Any, in_dims: tuple[Any, ...], positions: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    to = 0 if len(rest) < 4 or rest[3] is None else 1  # after the axis of rows
    return torch.ops.ropewalk.angles(positions.movedim(in_dims[0], to), *rest), (0, 0)


_library.impl("angles", _angles, "CompositeExplicitAutograd")
_library.impl("angles", _angles_meta, "Meta")
torch.library.register_vmap("ropewalk::angles", _angles_vmap, lib=_library)


def _cos_sin_rounded(angle: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def _require_float64(has_float64: bool, device: torch.device) -> None:
    if not has_float64:
        raise _checks.error(
            "Rope.at",
            "the device must support float64 for fractional positions and for float64 tables",
            str(device),
            "Compute them on the CPU: rope.at(positions.cpu()).to(device).",
        )


# Coefficients of cos(π/4 · t) and sin(π/4 · t) / t in powers of t², for |t| ≤ 1. They are Chebyshev fits computed with
# 40 digits, with an error of 4e-11. π/4 itself is split into two float32 numbers.
_COS = (1.0, -0.30842513753381972025, 0.015854344232677915077, -0.00032599179779493027298, 3.5906106809310756361e-6,
        -2.4325418653288861317e-8)  # fmt: skip
_SIN = (-0.080745512174660416512, 0.002490394134287067041, -0.00003657402319664734643, 3.0986623576829848437e-7)
_QUARTER_PI_HIGH = 0.785398185253143310546875  # float32(π/4)
_QUARTER_PI_LOW = math.pi / 4 - _QUARTER_PI_HIGH


def cos_sin_of_phase_float32(phase: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of int64 phases (2⁻⁶⁴ turns), with float32 arithmetic only. |error| ≤ 1e-7 times `factor`."""
    quadrant = (phase + (1 << 61)) >> 62
    residual = phase - (quadrant << 62)
    t = residual.to(torch.float32) * 2.0**-61
    u = t * t
    cos, sin = _polynomial(_COS, u), t * _QUARTER_PI_HIGH + t * (_QUARTER_PI_LOW + u * _polynomial(_SIN, u))
    odd = (quadrant & 1).to(torch.bool)
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    # cos is negative in quadrants 1 and 2, sin in 2 and 3.
    cos = torch.where(((quadrant + 1) & 2).to(torch.bool), -cos, cos)
    sin = torch.where((quadrant & 2).to(torch.bool), -sin, sin)
    return cos * factor, sin * factor


def _polynomial(coefficients: tuple[float, ...], u: Tensor) -> Tensor:
    result = torch.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * u + c
    return result
