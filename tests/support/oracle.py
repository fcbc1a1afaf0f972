"""The formulas of the papers in mpmath and float64, as the reference for tests. Imports nothing of ropewalk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import mpmath
import numpy as np

PRECISION = 60  # decimal digits: a position of 2³¹ times a frequency leaves 50 of them for the angle


def inv_freq(base: float, rotary_dim: int) -> list[mpmath.mpf]:
    """Return base^(−2i/d) for each pair i, exact."""
    with mpmath.workdps(PRECISION):
        return [mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / rotary_dim) for i in range(rotary_dim // 2)]


def linear(base: float, rotary_dim: int, factor: float) -> list[mpmath.mpf]:
    with mpmath.workdps(PRECISION):
        return [w / factor for w in inv_freq(base, rotary_dim)]


def by_parts(base: float, rotary_dim: int, factor: float, alpha: float, beta: float, length: int) -> list[mpmath.mpf]:
    """Return the frequencies of NTK-by-parts (YaRN paper, section 3.2). Llama 3's scaling is the same.

    γ grows linearly with the number of turns r = L/λ.
    """
    with mpmath.workdps(PRECISION):
        result = []
        for w in inv_freq(base, rotary_dim):
            turns = length * w / (2 * mpmath.pi)
            if alpha == beta:
                gamma = mpmath.mpf(turns > beta)
            else:
                gamma = min(max((turns - alpha) / (mpmath.mpf(beta) - alpha), 0), 1)
            result.append((1 - gamma) * w / factor + gamma * w)
        return result


def yarn(
    base: float, rotary_dim: int, factor: float, length: int, fast: float = 32, slow: float = 1, truncate: bool = True
) -> list[mpmath.mpf]:
    """Return the frequencies of YaRN as in its authors' code, where the ramp is linear in the index of the pair."""
    with mpmath.workdps(PRECISION):

        def index(turns: float) -> mpmath.mpf:
            return rotary_dim * mpmath.log(length / (2 * mpmath.pi * turns)) / (2 * mpmath.log(base))

        low, high = index(fast), index(slow)
        if truncate:
            low, high = mpmath.floor(low), mpmath.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += mpmath.mpf("0.001")
        result = []
        for i, w in enumerate(inv_freq(base, rotary_dim)):
            interpolated = min(max((i - low) / (high - low), 0), 1)
            result.append(w / factor * interpolated + w * (1 - interpolated))
        return result


def cos_sin(positions: Iterable[int], frequencies: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of position · frequency, taking both as exact: float64 [positions, pairs]."""
    with mpmath.workdps(PRECISION):
        pairs = [[mpmath.mpf(int(p)) * mpmath.mpf(float(w)) for w in frequencies] for p in positions]
        return (
            np.array([[float(mpmath.cos(a)) for a in row] for row in pairs]),
            np.array([[float(mpmath.sin(a)) for a in row] for row in pairs]),
        )


def channels(rotary_dim: int, pairing: str, offset: int = 0) -> list[tuple[int, int]]:
    """Return the two channels of each pair."""
    half = rotary_dim // 2
    if pairing == "half":
        return [(offset + i, offset + i + half) for i in range(half)]
    return [(offset + 2 * i, offset + 2 * i + 1) for i in range(half)]


def rotate(x: np.ndarray, angles: np.ndarray, pairing: str, offset: int = 0, factor: float = 1.0) -> np.ndarray:
    """Rotate x [..., head_dim] by angles [..., pairs], as complex numbers in float64."""
    result = np.array(x, dtype=np.float64)
    turn = factor * np.exp(1j * np.asarray(angles, dtype=np.float64))
    for i, (a, b) in enumerate(channels(2 * angles.shape[-1], pairing, offset)):
        z = (np.asarray(x[..., a], np.float64) + 1j * np.asarray(x[..., b], np.float64)) * turn[..., i]
        result[..., a], result[..., b] = z.real, z.imag
    return result


def rotate_by_tables(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: str, offset: int = 0, inverse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate x [..., head_dim] by any cos and sin [..., pairs] in float64. Return the result and Σ|terms|."""
    result = np.array(x, dtype=np.float64)
    size = np.zeros_like(result)
    c, s = np.asarray(cos, np.float64), np.asarray(sin, np.float64) * (-1 if inverse else 1)
    first, second = (list(places) for places in zip(*channels(2 * c.shape[-1], pairing, offset), strict=True))
    a, b = result[..., first], result[..., second]
    with np.errstate(invalid="ignore"):
        result[..., first], result[..., second] = a * c - b * s, a * s + b * c
        size[..., first], size[..., second] = abs(a * c) + abs(b * s), abs(a * s) + abs(b * c)
    return result, size


def table_gradient(
    x: np.ndarray, grad: np.ndarray, pairs: int, pairing: str, offset: int = 0, inverse: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of Σ grad · rotated(x) to cos and to sin, and Σ|terms|, each [..., pairs].

    Args:
        x, grad: [..., heads, head_dim].
    """
    first, second = (list(places) for places in zip(*channels(2 * pairs, pairing, offset), strict=True))
    (a, b), (g, h) = (
        (np.asarray(y, np.float64)[..., first], np.asarray(y, np.float64)[..., second]) for y in (x, grad)
    )
    size = (abs(a) + abs(b)) * (abs(g) + abs(h))
    by_sin = (h * a - g * b) * (-1 if inverse else 1)
    return (g * a + h * b).sum(-2), by_sin.sum(-2), size.sum(-2)


def cos_sin_of_steps(positions: Iterable[int], steps: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of position · step (2⁻⁶⁴ turns), reduced in integers: float64 [positions, steps]."""
    with mpmath.workdps(PRECISION):
        unit = 2 * mpmath.pi / mpmath.mpf(2) ** 64
        angles = [[int(p) * int(s) % 2**64 * unit for s in steps] for p in positions]
        return tuple(  # type: ignore[return-value]
            np.array([[float(f(a)) for a in row] for row in angles]).reshape(len(angles), len(steps))
            for f in (mpmath.cos, mpmath.sin)
        )


def reduced(positions: Iterable[int], frequencies: Sequence[float]) -> np.ndarray:
    """Return the angles in (−π, π], reduced exactly before they are rounded to float64: [positions, pairs]."""
    with mpmath.workdps(PRECISION):
        turn = 2 * mpmath.pi
        rows = [[mpmath.mpf(int(p)) * mpmath.mpf(float(w)) for w in frequencies] for p in positions]
        return np.array([[float(a - turn * mpmath.nint(a / turn)) for a in row] for row in rows])


def golden_q(shape: Sequence[int]) -> np.ndarray:
    """Return the queries of the golden files, by a formula that needs no random generator."""
    i = np.arange(math.prod(shape), dtype=np.int64)
    return np.sin(0.1 + 0.7 * i + 0.3 * (i * i % 11)).astype(np.float32).reshape(shape)


def golden_k(shape: Sequence[int]) -> np.ndarray:
    """Return the keys of the golden files."""
    i = np.arange(math.prod(shape), dtype=np.int64)
    return np.cos(0.2 + 0.9 * i + 0.5 * (i * i % 13)).astype(np.float32).reshape(shape)


def ntk(base: float, rotary_dim: int, alpha: float) -> list[mpmath.mpf]:
    """Return the NTK-aware frequencies, those of base · alpha^(d / (d − 2))."""
    with mpmath.workdps(PRECISION):
        stretched = mpmath.mpf(base) * mpmath.mpf(alpha) ** (mpmath.mpf(rotary_dim) / (rotary_dim - 2))
        return [stretched ** (-mpmath.mpf(2 * i) / rotary_dim) for i in range(rotary_dim // 2)]


def proportional(base: float, head_dim: int, share: float, factor: float = 1) -> list[mpmath.mpf]:
    """Return the frequencies of p-RoPE: exponents of the whole head, and 0 for the pairs after the share."""
    with mpmath.workdps(PRECISION):
        return [
            w / factor if 2 * (i + 1) <= share * head_dim else mpmath.mpf(0)
            for i, w in enumerate(inv_freq(base, head_dim))
        ]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, add_one: bool = False) -> np.ndarray:
    """Return x / √(mean of x² over the last axis + ε) · weight, in NumPy's widest float."""
    wide = np.asarray(x, np.longdouble)
    gain = np.asarray(weight, np.longdouble) + (1 if add_one else 0)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.longdouble(eps)) * gain


def quantized(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return heads [..., head_dim], float32 or float64, as numbers of 8 bits and their scales, each in float32.

    An int8 number of a head whose scale is not finite is 0, and reads as NaN.
    """
    largest = {"int8": 127, "fp8": 448}[name]
    with np.errstate(invalid="ignore"):
        scales = np.maximum(abs(x).max(-1) / x.dtype.type(largest), x.dtype.type(2.0**-100)).astype(np.float32)
        scaled = x / scales[..., None]
    if name == "int8":
        return np.nan_to_num(np.rint(scaled), nan=0).astype(np.int8).astype(np.float32), scales
    # e4m3 has 4 bits of the exponent and 3 of the fraction. Between two of its numbers, the even one is chosen.
    grid = np.array([(8 + i % 8) * 2.0 ** (i // 8 - 10) if i > 7 else i * 2.0**-9 for i in range(127)])
    size = abs(scaled.astype(np.float32)).astype(np.float64)
    above = np.minimum(np.searchsorted(grid, size), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = grid[above] - size, size - grid[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(scaled), np.nan, np.copysign(grid[code], scaled)).astype(np.float32), scales


def rms_norm_gradient(
    x: np.ndarray, weight: np.ndarray, grad: np.ndarray, eps: float, add_one: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of Σ grad · rms_norm(x) to x and to the weight, in float64, by written-out derivatives."""
    x, grad, n = np.asarray(x, np.float64), np.asarray(grad, np.float64), x.shape[-1]
    gain = np.asarray(weight, np.float64) + (1 if add_one else 0)
    root = np.sqrt((x * x).mean(-1) + eps)[..., None, None]
    # d(x_j / root) / d x_i = [i = j] / root − x_i x_j / (n root³)
    partial = np.eye(n) / root - x[..., :, None] * x[..., None, :] / (n * root**3)
    to_weight = (grad * x / root[..., 0]).reshape(-1, n).sum(0)
    return np.einsum("...ij,...j->...i", partial, grad * gain), to_weight
