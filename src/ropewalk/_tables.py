"""cos and sin of integer positions in NumPy, for those who have no torch: bit for bit the kernels' float64.

    phase = position · step        int64, wraps around: reduced modulo one turn without rounding

The two upper bits of a phase, rounded, are its quadrant; the rest is t, within an eighth of a turn, in units of π/4.
The polynomials in t² are those of csrc/kernels.cpp, in the same order of products and sums.
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

_MOST_AT_ONCE = 1 << 16  # angles, so that what is between positions and results stays in the cache


def cos_sin(
    positions: Any, steps: tuple[int, ...], factor: float, axis: tuple[int, ...] | None, axes: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position and pair, times `factor`; float64, `positions.shape + (pairs,)`.

    Args:
        axis: which of the first axis of positions each pair takes, and `axes`: how many there are; None: there is none.
    """
    places = _as_integers(positions)
    if axes is not None and (places.ndim == 0 or places.shape[0] != axes):
        must = f"positions of a rope with axes must have shape [{axes}, ...]"
        raise _checks.error("Rope.tables", must, f"shape {places.shape}", "Pass a row for each axis.")
    turns, shape = np.array(steps, dtype=np.int64), places.shape[axes is not None :]
    rows, of_pairs = places.reshape(axes or 1, -1), slice(None) if axis is None else list(axis)
    cos, sin = (np.empty((rows.shape[1], turns.size)) for _ in range(2))
    at_once = max(1, _MOST_AT_ONCE // turns.size)
    for first in range(0, rows.shape[1], at_once):
        part = slice(first, first + at_once)
        cos[part], sin[part] = _cos_sin_of_phases(rows[of_pairs, part].T * turns, factor)
    return cos.reshape(*shape, turns.size), sin.reshape(*shape, turns.size)


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
    """Positions as an int64 array; what is no array of integers is refused, not converted."""
    who, must = "Rope.tables", "positions must be integers: an int, a list of them, or an array"
    try:
        places = np.asarray(positions)
    except Exception as e:  # a ragged list, a tensor on a GPU, or whatever an array of another library raises
        raise _checks.error(who, must, _checks.shown(positions), "Pass one int, or an array of ints.") from e
    if places.size == 0 and isinstance(positions, (list, tuple)):
        places = places.astype(np.int64)  # to NumPy, an empty list holds floats
    if places.dtype.kind == "f":
        raise _checks.error(
            who,
            must,
            f"{places.dtype} of shape {places.shape}",
            "For places between tokens use rope.at, or NumPy's cos and sin of positions[..., None] * rope.inv_freq.",
        )
    if places.dtype.kind not in "iu":
        raise _checks.error(
            who,
            must,
            f"{places.dtype} of shape {places.shape}",
            "Pass the place of each token, such as np.arange(seq).",
        )
    if places.dtype == np.uint64 and (places > np.uint64(2**63 - 1)).any():
        raise _checks.error(who, "positions must fit into int64", "larger ones", "Are these positions of tokens?")
    return places.astype(np.int64)
