"""Which angle is that? Positions and steps → cos and sin, exactly. The only place that decides precision.

    phase = position · step        int64, wraps around: reduced modulo one turn without rounding

float64 where the device has it: cos and sin of the phase, rounded once. Elsewhere the top two bits of the phase give
the quadrant, the rest a residual within an eighth of a turn, and a float32 polynomial its cosine and sine (not
`torch.cos`: the compiled one is off by 1.1e-7, and it is slow on GPUs).

Plain tensors on the CPU or a GPU go to the compiled kernels, which do the same in float64: quadrant, residual and a
polynomial. Code compiled for a GPU calls an operator, `ropewalk::angles`, that is given the steps as numbers: as a
constant of the graph they would be copied to the GPU at every call.

Float positions (image grids) go through a float64 product instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.kernels import backend

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)
_NO_FLOAT64 = frozenset({"mps"})

_RADIANS_PER_UNIT = 2 * math.pi / 2**64


def check_positions(positions: Tensor) -> None:
    """Raise unless positions are a tensor `[seq]` or `[batch, seq]` of a dtype that holds places exactly."""
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
            "Keep positions out of .half(), .bfloat16() and autocast: 16 bits cannot tell neighbours apart beyond 256.",
        )
    if positions.ndim not in (1, 2):
        raise _checks.error(
            who,
            "positions must have shape [seq] or [batch, seq]",
            f"shape {tuple(positions.shape)}",
            "Several axes for each token (M-RoPE) are not supported yet.",
        )


def delta_tensor(delta: int | Tensor, device: torch.device | str | None) -> Tensor:
    """A shift as an integer tensor: `[]` for an int, else as it came."""
    who = "Rope.shift"
    if isinstance(delta, Tensor):
        if delta.dtype not in _INTEGERS or delta.ndim > 2:
            raise _checks.error(
                who,
                "delta must be an int or an int32 or int64 tensor [], [seq] or [batch, seq]",
                f"{delta.dtype} of shape {tuple(delta.shape)}",
                "Pass how many tokens each key moves.",
            )
        return delta
    _checks.integer(who, "delta", delta, at_least=-(2**63), at_most=2**63 - 1)
    # full and not tensor, which would copy to a GPU and wait.
    return torch.full((), delta, dtype=torch.int64, device="cpu" if device is None else device)


def cos_sin(
    positions: Tensor,
    steps: tuple[int, ...],
    inv_freq: tuple[float, ...],
    factor: float,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, times `factor`.

    Args:
        positions: any shape; int32, int64, float32 or float64.
        steps: turn of each pair at each position, in 2⁻⁶⁴ turns, signed (see `_fixed_point`).
        inv_freq: the same in radians, for float positions.
        factor: the attention factor, dimensionless.
        device, dtype: of the result; those of positions and torch.float32 when None.

    Returns:
        Two tensors of shape `positions.shape + (pairs,)`.

    Raises:
        RopeError: dtype is not float32 or float64, or the device has no float64 and it is needed.
    """
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in _FLOATS:
        raise _checks.error(
            "Rope.at",
            "dtype must be torch.float32 or torch.float64",
            str(dtype),
            "Tables in 16 bits lose the angle; q and k keep their own dtype whatever the tables have.",
        )
    positions = positions if device is None else positions.to(device)
    has_float64 = positions.device.type not in _NO_FLOAT64
    if positions.dtype in _INTEGERS:
        if positions.is_cuda and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            _bring(steps, positions.device)
            made: tuple[Tensor, Tensor] = torch.ops.ropewalk.angles(positions, steps, factor, dtype)
            return made
        if has_float64:
            return _of_integers(positions, steps, factor, dtype)
        _require_float64(dtype == torch.float32, positions.device)
        phase = positions.to(torch.int64).unsqueeze(-1) * _tensor_of(steps, positions)
        return cos_sin_of_phase_float32(phase, factor)
    _require_float64(has_float64, positions.device)
    speeds = torch.tensor(inv_freq, dtype=torch.float64, device=positions.device)
    return _rounded(positions.to(torch.float64).unsqueeze(-1) * speeds, factor, dtype)


def _of_integers(positions: Tensor, steps: tuple[int, ...], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    speeds = _tensor_of(steps, positions)
    kernel = backend.kernel_for(positions, speeds)
    if kernel is not None:
        made: tuple[Tensor, Tensor] = kernel.angles(positions, speeds, factor, dtype)
        return made
    phase = positions.to(torch.int64).unsqueeze(-1) * speeds
    return _rounded(phase.to(torch.float64) * _RADIANS_PER_UNIT, factor, dtype)


def _rounded(angle: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def _angles_operator(positions: Tensor, steps: list[int], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if positions.dtype not in _INTEGERS or dtype not in _FLOATS or not steps:
        raise _checks.error(
            "torch.ops.ropewalk.angles",
            "positions must be int32 or int64, dtype float32 or float64, and there must be steps",
            f"{positions.dtype}, {dtype} and {len(steps)} steps",
            "Use Rope.at.",
        )
    return _of_integers(positions, tuple(steps), factor, dtype)


def _angles_meta(positions: Tensor, steps: list[int], factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = (positions.new_empty((*positions.shape, len(steps)), dtype=dtype) for _ in range(2))
    return cos, sin


def _angles_vmap(
    info: Any, in_dims: tuple[Any, ...], positions: Tensor, *rest: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    return torch.ops.ropewalk.angles(positions.movedim(in_dims[0], 0), *rest), (0, 0)


_library: Any = torch.library.Library("ropewalk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("angles(Tensor positions, int[] steps, float factor, ScalarType dtype) -> (Tensor, Tensor)")
for _key in ("CPU", "CUDA"):
    _library.impl("angles", _angles_operator, _key)
_library.impl("angles", _angles_meta, "Meta")
torch.library.register_vmap("ropewalk::angles", _angles_vmap, lib=_library)


def _require_float64(has_float64: bool, device: torch.device) -> None:
    if not has_float64:
        raise _checks.error(
            "Rope.at",
            "float positions and float64 tables need a device with float64",
            str(device),
            "Make them on the CPU: rope.at(positions.cpu()).to(device).",
        )


# Coefficients of cos(π/4 · t) and sin(π/4 · t) / t in powers of t², |t| ≤ 1: Chebyshev fits in 40 digits, error
# 4e-11. π/4 itself is split in two float32 numbers.
_COS = (1.0, -0.30842513753381972025, 0.015854344232677915077, -0.00032599179779493027298, 3.5906106809310756361e-6,
        -2.4325418653288861317e-8)  # fmt: skip
_SIN = (-0.080745512174660416512, 0.002490394134287067041, -0.00003657402319664734643, 3.0986623576829848437e-7)
_QUARTER_PI_HIGH = 0.785398185253143310546875  # float32(π/4)
_QUARTER_PI_LOW = math.pi / 4 - _QUARTER_PI_HIGH


def cos_sin_of_phase_float32(phase: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin of int64 phases (2⁻⁶⁴ turns) with float32 arithmetic only; |error| ≤ 1e-7 times `factor`."""
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


_MOST_KEPT = 1024
_steps_on_device: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
# Captured CUDA graphs read these at every replay, so they are never freed.
_in_graphs: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _tensor_of(steps: tuple[int, ...], positions: Tensor) -> Tensor:
    """The steps as a tensor beside positions.

    Kept for the next call, which then copies nothing to the device; but only where both are ordinary tensors: one
    made under FakeTensorMode, functorch or while compiling would poison the calls after it.
    """
    device = positions.device
    if (
        torch.compiler.is_compiling()
        or type(positions) is not Tensor
        or positions.is_meta
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    ):
        return torch.tensor(steps, dtype=torch.int64, device=device)
    kept = _steps_on_device.get((steps, device))
    if kept is None:
        kept = _made(steps, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[steps, device] = kept
    return kept


def _made(steps: tuple[int, ...], device: torch.device) -> Tensor:
    made = torch.tensor(steps, dtype=torch.int64, device=device)
    if type(made) is Tensor:  # a mode around us may have made it something else
        if len(_steps_on_device) >= _MOST_KEPT:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a stream may still read what is freed now
            _steps_on_device.clear()
        _steps_on_device[steps, device] = made
    return made


def _bring(steps: tuple[int, ...], device: torch.device) -> bool:
    """Bring the steps to the device while PyTorch traces, and not when the compiled code first runs.

    That may be inside the memory of a CUDA graph ("reduce-overhead"), where nothing may be kept for later calls.
    """
    if torch.cuda.is_available() and (steps, device) not in _steps_on_device:
        _made(steps, device)
    return True


# What torch.compiler.assume_constant_result does, which would import the compiler (1.5 s) for those who do not compile.
_bring._dynamo_marked_constant = True  # type: ignore[attr-defined]
