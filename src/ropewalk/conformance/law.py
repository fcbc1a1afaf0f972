"""Identify the law of the measured angles: the expected frequencies, those of a known bug, or a base that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk import Rope

CLOSE = 2e-5
"""Tolerance of cos and sin at positions below 64. Float32 frequencies and products cost at most 64 · 2⁻²²."""


@dataclass(frozen=True)
class Law:
    """A rule for the multiplier, factor · (cos + i·sin), of each pair at a position.

    Args:
        inv_freq: radians per token, `[pairs]`, float64.
        factor: the factor of cos and sin, dimensionless.
        shift: the number of tokens added to each position.
        kind: "plain", "backwards" (the angle is negated), or "swapped" (cos and sin are exchanged).
        rounding: what is rounded to `dtype`: "frequencies", "angles", "tables" or "positions". None means nothing.
        dtype: the dtype of the rounding.
        code: the code of the bug that this law describes, or None for a right law.
        says: what was measured, in one sentence.
    """

    inv_freq: Tensor
    factor: float = 1.0
    shift: int = 0
    kind: str = "plain"
    rounding: str | None = None
    dtype: torch.dtype = torch.bfloat16
    code: str | None = None
    says: str = ""

    def at(self, positions: Tensor) -> Tensor:
        """Return the multipliers at positions `[...]`, complex128 `[..., pairs]`."""
        p = (positions + self.shift).to(torch.float64)
        f = self.inv_freq
        if self.rounding == "positions":
            p = p.to(self.dtype).to(torch.float64)
        if self.rounding == "frequencies":
            f = f.float().to(self.dtype).to(torch.float64)
        angles = p[..., None] * f
        if self.rounding == "angles":
            angles = angles.float().to(self.dtype).to(torch.float64)
        z = torch.polar(torch.ones_like(angles), angles)
        if self.rounding == "tables":
            z = torch.complex(*(t.float().to(self.dtype).to(torch.float64) for t in (z.real, z.imag)))
        z = {"plain": z, "backwards": z.conj(), "swapped": 1j * z.conj()}[self.kind]
        return self.factor * z

    def error(self, multipliers: Tensor, positions: Tensor) -> float:
        """Return the largest distance of measured multipliers from the law, relative to the factor."""
        return largest_error(multipliers, self.at(positions), self.factor)


def largest_error(multipliers: Tensor, expected: Tensor, factor: float) -> float:
    """Return the largest distance of multipliers from the expected ones, relative to `factor`.

    Return inf if any of the distances is not finite.
    """
    error = float((multipliers - expected).abs().max()) / factor
    return error if math.isfinite(error) else math.inf


def identify(multipliers: Tensor, positions: Tensor, rope: Rope | None, head_dim: int) -> Law:
    """Identify the law of multipliers that were measured at small positions.

    Args:
        multipliers: complex128 `[tokens, pairs]`.
        positions: int64 `[tokens]`.
        rope: the expected rope. With None, the measured frequencies count as right.
        head_dim: the number of channels of a head.

    Returns:
        The first candidate within CLOSE of the multipliers. If there is none, a law with the measured frequencies and
        the code "wrong-base" or "wrong-frequencies".
    """
    size = float(multipliers.abs().median())
    factor = size if math.isfinite(size) and size > 0 else 1.0
    if rope is None:
        return Law(measure_frequencies(multipliers, positions), factor)
    expected = _nonzero(rope.inv_freq)
    if len(expected) != multipliers.shape[-1]:
        return Law(
            measure_frequencies(multipliers, positions),
            factor,
            code="wrong-frequencies",
            says=f"{multipliers.shape[-1]} pairs are rotated instead of {len(expected)}.",
        )
    for law in _candidates(rope, torch.from_numpy(expected), head_dim):
        law = replace(law, factor=rope.attention_factor if law.rounding else factor)
        if law.error(multipliers, positions) < CLOSE:
            return law
    inv_freq = measure_frequencies(multipliers, positions)
    if (fitted := fit_base(inv_freq, rope.rotary_dim)) is not None:
        base, divided = fitted
        says = f"The base is {base:.10g} instead of {rope.base:.10g}." if abs(divided - 1) < 1e-4 else ""
        return Law(
            inv_freq,
            factor,
            code="wrong-base" if says else "wrong-frequencies",
            says=says or _describe_difference(inv_freq, expected),
        )
    return Law(inv_freq, factor, code="wrong-frequencies", says=_describe_difference(inv_freq, expected))


def _candidates(rope: Rope, expected: Tensor, head_dim: int) -> Iterator[Law]:
    """Yield the right law first, then laws with one bug, then laws with two."""
    kinds = [
        Law(expected),
        Law(
            expected,
            kind="backwards",
            code="rotates-backwards",
            says="Every pair is rotated by minus its angle. This is right only for weights that were trained with it.",
        ),
        Law(
            expected, kind="swapped", code="cos-and-sin-swapped", says="At position 0, pairs are rotated by 90 degrees."
        ),
        *(
            Law(
                expected,
                shift=by,
                code="positions-off-by-one",
                says=f"The token at position 0 is rotated by the angles of {by}.",
            )
            for by in (1, -1)
        ),
    ]
    yield from kinds
    for dtype in (torch.bfloat16, torch.float16):
        for stage in ("tables", "frequencies", "angles"):
            like = " (or to TF32, the precision of matrix products on a GPU)" * (
                dtype == torch.float16 and stage == "frequencies"
            )
            says = f"They are rounded to {_dtype_name(dtype)}{like}."
            yield Law(expected, rounding=stage, dtype=dtype, code=f"low-precision-{stage}", says=says)
    for code, says, inv_freq in _wrong_frequencies(rope, head_dim):
        for kind in kinds[:2]:
            yield (
                replace(kind, inv_freq=torch.from_numpy(_nonzero(inv_freq)), code=code, says=says)
                if len(_nonzero(inv_freq)) == len(expected)
                else kind
            )


def _wrong_frequencies(rope: Rope, head_dim: int) -> Iterator[_KnownBug]:
    """Yield the code, the description and inv_freq of each known bug in the frequencies."""
    dim, scaling = rope.rotary_dim, rope.scaling
    steps = np.arange(0, dim, 2)
    yield "rotated-twice", "Position 1 has the angles of position 2.", 2 * rope.inv_freq
    yield "frequencies-reversed", "The first pair has the frequency of the last.", rope.inv_freq[::-1]
    plain = replace(rope, scaling=None).inv_freq
    if scaling is not None:
        yield "scaling-ignored", f"The frequencies are those of base {rope.base:.10g} without any scaling.", plain
        factor = getattr(scaling, "factor", None) or getattr(scaling, "alpha", None)
        if factor is not None:
            yield "scaling-inverted", f"They are multiplied by {factor:g} instead of divided.", plain * factor
            scheme_bugs = _SCHEME_BUGS.get(scaling.rope_type)
            if scheme_bugs is not None:
                yield from scheme_bugs(rope, scaling, plain)
    if dim != head_dim:
        frequencies = rope.base ** (-steps / head_dim)
        yield (
            "frequencies-over-head-dim",
            f"The exponents are 2i/{head_dim}, but {dim} channels are rotated.",
            frequencies,
        )
    for size in (dim - 2, dim + 2, dim // 2, 2 * dim):
        if size > 0:
            says = f"The exponents are 2i/{size}, but {dim} channels are rotated."
            as_base = f"This equals base {rope.base ** (dim / size):.6g} with 2i/{dim}."
            yield "wrong-exponent", f"{says} {as_base}", rope.base ** (-steps / size)


_KnownBug = tuple[str, str, np.ndarray]
"""Code, description and inv_freq of a bug."""


def _ntk_bugs(rope: Any, scaling: Any, plain: np.ndarray) -> Iterator[_KnownBug]:
    steps = np.arange(0, rope.rotary_dim, 2)
    frequencies = (rope.base * scaling.alpha) ** (-steps / rope.rotary_dim)
    yield "ntk-exponent", f"The base is multiplied by {scaling.alpha:g}.", frequencies


def _yarn_bugs(rope: Any, scaling: Any, plain: np.ndarray) -> Iterator[_KnownBug]:
    flipped = replace(rope, scaling=replace(scaling, truncate=not scaling.truncate))
    yield (
        "yarn-truncate",
        f"The frequencies are those of truncate: {str(not scaling.truncate).lower()}.",
        flipped.inv_freq,
    )
    mirrored = plain + plain / scaling.factor - rope.inv_freq
    yield "yarn-ramp-swapped", "Fast pairs are divided by the factor, and slow ones are not.", mirrored


def _llama3_bugs(rope: Any, scaling: Any, plain: np.ndarray) -> Iterator[_KnownBug]:
    slowest = plain / scaling.factor
    between = (rope.inv_freq < plain * (1 - 1e-9)) & (rope.inv_freq > slowest * (1 + 1e-9))
    mirrored = plain + slowest - rope.inv_freq
    says = f"The {between.sum()} pairs on the ramp have the mirrored frequency."
    yield "llama3-smooth-inverted", says, np.where(between, mirrored, rope.inv_freq)
    yield "llama3-smooth-inverted", "Fast pairs are divided by the factor, and slow ones are not.", mirrored


# rope_type → a function that yields the known bugs of that scheme.
_SCHEME_BUGS = {"ntk": _ntk_bugs, "yarn": _yarn_bugs, "llama3": _llama3_bugs}


def measure_frequencies(multipliers: Tensor, positions: Tensor) -> Tensor:
    """Measure the radians per token of each pair, between ±π, from the first two tokens."""
    return (multipliers[1] / multipliers[0]).angle() / int(positions[1] - positions[0])


def fit_base(inv_freq: Tensor, rotary_dim: int) -> tuple[float, float] | None:
    """Fit a geometric progression to `inv_freq`. Return its base and the divisor of all terms, or None if none fits."""
    f = inv_freq.abs().numpy()
    if len(f) < 2 or not np.isfinite(f).all() or (f <= 0).any():
        return None
    logs, steps = np.log(f), np.arange(len(f)) * 2 / rotary_dim
    slope, start = np.polyfit(steps, logs, 1)
    if np.abs(logs - (start + slope * steps)).max() > 1e-4 or slope >= 0:
        return None
    return round_digits(float(np.exp(-slope))), round_digits(float(np.exp(-start)))


def fit_scaled_base(inv_freq: Tensor, rotary_dim: int) -> tuple[float, float] | None:
    """Return the base of the fast pairs and the divisor of the slowest pair, or None if no scheme fits."""
    f = inv_freq.abs().numpy()
    if len(f) < 8 or (f <= 0).any() or abs(f[0] - 1) > 1e-4:
        return None
    base = round_digits(float((f[0] / f[2]) ** (rotary_dim / 4)))
    plain = base ** (-np.arange(0, 2 * len(f), 2) / rotary_dim)
    ratios = plain / f
    if base <= 1 or (np.diff(ratios) < -1e-3).any() or abs(ratios[1] - 1) > 1e-4 or ratios[-1] < 1.001:
        return None
    return base, round_digits(float(ratios[-1]))


def round_digits(number: float) -> float:
    """Round a number to the fewest significant digits that change it by less than 2e-5 of its value."""
    for digits in range(1, 8):
        rounded = float(f"{number:.{digits}g}")
        if abs(rounded / number - 1) < 2e-5:
            return rounded
    return number


def _nonzero(inv_freq: np.ndarray) -> np.ndarray:
    """Drop the pairs with frequency 0, which are indistinguishable from channels that are not rotated."""
    return np.asarray(inv_freq[inv_freq != 0], dtype=np.float64)


def _describe_difference(measured: Tensor, expected: np.ndarray) -> str:
    ratio = np.abs(measured.numpy()) / expected
    pair = int(np.abs(np.log(np.maximum(ratio, 1e-30))).argmax())
    return f"Pair {pair} has {ratio[pair]:.4g} times the expected frequency of {expected[pair]:.4g} radians per token."


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
