"""Compute cos and sin of integer positions in NumPy, without torch.

The float64 results are equal to those of the compiled kernels.

    phase = position · phase step        int64; wraparound reduces modulo one turn without rounding

The upper two bits of a phase, rounded to nearest, are its quadrant. The residual t is within an eighth of a turn, in
units of π/4. The polynomials in t² are those of csrc/kernels.cpp, with the same order of products and sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ropewalk import _checks

# cos(π/4 · t), and (sin(π/4 · t) / t − π/4) / t², in powers of t².
_COS = (1.0, -0.30842513753404245296, 0.015854344243815419319, -0.00032599188692673764224, 3.5908604460279520345e-6,
        -2.4611364033652596137e-8, 1.1500512028217341338e-10, -3.858189007341667731e-13)  # fmt: skip
_SIN = (-0.080745512188280771809, 0.0024903945701920074546, -0.00003657620417386099773, 3.1336165354315280849e-7,
        -1.7571791752800344071e-9, 6.8874821400921976273e-12)  # fmt: skip
_QUARTER_PI = 0.78539816339744830962

_MAX_BLOCK = 1 << 16  # angles per block, so that intermediate arrays stay in the cache


def cos_sin(
    positions: Any, phase_steps: tuple[int, ...], factor: float, axis: tuple[int, ...] | None, axes: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of every position and pair, multiplied by `factor`.

    Args:
        positions: integers of any shape; `[axes, ...]` if each token has several positions.
        phase_steps: the phase step of each pair, in 2⁻⁶⁴ turns per position (`angles.fixed_point`).
        factor: the attention factor, dimensionless.
        axis: for each pair, the index of the axis whose position it uses. None if each token has one position.
        axes: number of positions of each token. None if each token has one position, without the leading axis.

    Returns:
        Two float64 arrays of shape `positions.shape + (pairs,)`, without the leading `axes`.
    """
    integers = _as_integers(positions)
    if axes is not None and (integers.ndim == 0 or integers.shape[0] != axes):
        must = f"positions of a rope with axes must have shape [{axes}, ...]"
        raise _checks.error("Rope.tables", must, f"shape {integers.shape}", "Pass a row for each axis.")
    phase_steps_array, shape = np.array(phase_steps, dtype=np.int64), integers.shape[axes is not None :]
    rows, row_of_pair = integers.reshape(axes or 1, -1), slice(None) if axis is None else list(axis)
    cos, sin = (np.empty((rows.shape[1], phase_steps_array.size)) for _ in range(2))
    block = max(1, _MAX_BLOCK // phase_steps_array.size)
    for first in range(0, rows.shape[1], block):
        part = slice(first, first + block)
        cos[part], sin[part] = _cos_sin_of_phases(rows[row_of_pair, part].T * phase_steps_array, factor)
    return cos.reshape(*shape, phase_steps_array.size), sin.reshape(*shape, phase_steps_array.size)


def _cos_sin_of_phases(phase: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    quadrant = (phase + np.int64(1 << 61)) >> 62
    t = (phase - (quadrant << 62)).astype(np.float64) * 2.0**-61
    u = t * t
    c, s = _polynomial(_COS, u), t * (_QUARTER_PI + u * _polynomial(_SIN, u))
    odd = (quadrant & 1) != 0
    cos, sin = np.where(odd, s, c), np.where(odd, c, s)
    # cos is negative in quadrants 1 and 2, sin in 2 and 3.
    np.negative(cos, out=cos, where=((quadrant + 1) & 2) != 0)
    np.negative(sin, out=sin, where=(quadrant & 2) != 0)
    return cos * factor, sin * factor


def _polynomial(coefficients: tuple[float, ...], u: np.ndarray) -> np.ndarray:
    result = np.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * u + c
    return result


def _as_integers(positions: Any) -> np.ndarray:
    """Return positions as an int64 array. Anything but integers is rejected, not converted."""
    who, must = "Rope.tables", "positions must be integers: an int, a list of ints, or an array"
    try:
        array = np.asarray(positions)
    except Exception as e:  # a ragged list, a tensor on a GPU, or any error of another array library
        raise _checks.error(who, must, _checks.shown(positions), "Pass one int, or an array of ints.") from e
    if array.size == 0 and isinstance(positions, (list, tuple)):
        array = array.astype(np.int64)  # NumPy converts an empty list to floats
    if array.dtype.kind == "f":
        raise _checks.error(
            who,
            must,
            f"{array.dtype} of shape {array.shape}",
            "For fractional positions use rope.at, or NumPy's cos and sin of positions[..., None] * rope.inv_freq.",
        )
    if array.dtype.kind not in "iu":
        raise _checks.error(
            who,
            must,
            f"{array.dtype} of shape {array.shape}",
            "Pass the position of each token, such as np.arange(seq).",
        )
    if array.dtype == np.uint64 and (array > np.uint64(2**63 - 1)).any():
        fix = "Check that these are positions of tokens."
        raise _checks.error(who, "positions must fit into int64", "larger positions", fix)
    return array.astype(np.int64)
