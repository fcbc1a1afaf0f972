"""Identify the law of the measured angles: the expected frequencies, those of a known bug, or a base that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ropewalk import Axes, Rope, formats

ROUNDED = 1e-6
"""Tolerance of cos and sin of an exact angle: sixteen roundings of float32, such as those of a norm around them."""

_FITTED = 2e-5  # relative error of a fitted base, as `round_digits` rounds it

NOT_PROPORTIONAL = "The angles are not proportional to the positions."

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Law:
    """A rule for the multiplier, factor · (cos + i·sin), of each pair at a position.

    Args:
        inv_freq: radians per token, `[pairs]`, float64.
        factor: the factor of cos and sin, dimensionless.
        shift: the number of tokens added to each position.
        kind: "plain", "backwards" (the angle is negated), or "swapped" (cos and sin are exchanged).
        code: the code of the bug that this law describes, or None for a right law.
        says: what was measured, in one sentence.
        uncertain: the relative error of each frequency that is only known from the measurement, `[pairs]`.
        noise: the error of cos and sin, relative to the factor, of a table that is stored in 16 bits.
    """

    inv_freq: Tensor
    factor: float = 1.0
    shift: int = 0
    kind: str = "plain"
    code: str | None = None
    says: str = ""
    uncertain: Tensor | float = 0.0
    noise: float = 0.0

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles at positions `[...]`, in radians, `[..., pairs]`."""
        return (positions + self.shift).to(torch.float64)[..., None] * self.inv_freq

    def at(self, positions: Tensor) -> Tensor:
        """Return the multipliers at positions `[...]`, complex128 `[..., pairs]`."""
        return self.of(self.angles(positions))

    def of(self, angles: Tensor) -> Tensor:
        """Return the multipliers of angles in radians, complex128."""
        z = torch.polar(torch.ones_like(angles), angles)
        return self.factor * {"plain": z, "backwards": z.conj(), "swapped": 1j * z.conj()}[self.kind]

    def bound(self, positions: Tensor) -> Tensor:
        """Return the error of cos and sin of each pair, relative to the factor, that float32 explains at positions.

        The first frequency of a progression is a power of two, in most ropes 1, so its angles are exact. Others have
        the error of four roundings (`formats.FLOAT32`), of the product, of an exponent that is rounded three times, and
        of two more roundings for each frequency before theirs, if each is computed from the previous one. At position
        1,048,575, this was measured to be 2 to 5 times the error of float32 code.
        """
        size = self.inv_freq.abs().clamp(min=1e-30)
        rank = (size > size[:, None]).sum(1)
        roundings = 5 + 3 * size.log().abs() + 2 * rank
        is_exact = (rank == 0) & (size.frexp().mantissa == 0.5)
        relative = torch.where(is_exact, 0.0, roundings * formats.FLOAT32 / 4) + self.uncertain
        return ROUNDED + self.noise + self.angles(positions).abs() * relative

    def excess(self, multipliers: Tensor, positions: Tensor) -> Tensor:
        """Return the error of measured multipliers, as multiples of the error that float32 explains in each pair."""
        off = (multipliers - self.at(positions)).abs() / self.factor / self.bound(positions)
        return off.nan_to_num(nan=math.inf, posinf=math.inf)

    def explains(self, multipliers: Tensor, positions: Tensor) -> bool:
        """Return whether measured multipliers are those of the law, within the error that float32 explains."""
        return bool((self.excess(multipliers, positions) <= 1).all())

    def agree(self, a: Tensor, b: Tensor, positions: Tensor) -> bool:
        """Return whether two measurements at positions differ no more than two of this law do in float32."""
        return bool(((a - b).abs() <= 2 * self.factor * self.bound(positions)).all())

    def describe_error(self, multipliers: Tensor, position: Tensor) -> str:
        """Say how far multipliers `[pairs]` at one position are from the law, for the pair with the largest excess."""
        pair = int(self.excess(multipliers, position).argmax())
        off = float((multipliers - self.at(position))[pair].abs()) / self.factor
        says = f"At position {int(position):,}, cos and sin of pair {pair} are off by {off:.2g}."
        return f"{says} Float32 explains at most {float(self.bound(position)[pair]):.1e}."


def identify(
    multipliers: Tensor,
    positions: Tensor,
    rope: Rope | None,
    head_dim: int,
    *,
    is_fitted: bool = False,
    noise: float = 0.0,
) -> Law:
    """Identify the law of multipliers `[tokens, pairs]` that were measured at small positions `[tokens]`.

    Without a rope, the measured frequencies count as right. With `is_fitted`, its base is itself a measurement, which
    counts as exact if it has 3 digits. Otherwise, frequencies that no law explains are "wrong-base" or
    "wrong-frequencies".
    """
    factor = float(multipliers.abs().median()) or 1.0
    inv_freq = measure_frequencies(multipliers, positions)
    measured = Law(inv_freq, factor, uncertain=(formats.FLOAT32 + noise) / inv_freq.abs().clamp(min=1e-30), noise=noise)
    if not measured.explains(multipliers, positions):
        measured = replace(measured, code="wrong-frequencies", says=NOT_PROPORTIONAL)
    if rope is None:
        return measured
    expected = moving(rope.inv_freq)
    if len(expected) != len(inv_freq):
        says = f"{len(inv_freq)} pairs are rotated instead of {len(expected)}."
        return replace(measured, code="wrong-frequencies", says=says)
    steady = int((expected - 1e-3).abs().argmin())  # a pair with clear angles, whose first is within half a turn
    shift = round(float(multipliers[0, steady].angle() / expected[steady]))
    is_exact = not is_fitted or rope.base == float(f"{rope.base:.3g}")
    uncertain = 0.0 if is_exact else _FITTED * expected.log().abs() / math.log(rope.base)
    right = Law(expected, factor, uncertain=uncertain, noise=noise)
    backwards = replace(right, kind="backwards", code="rotates-backwards", says=BACKWARDS)
    swapped = "At position 0, pairs are rotated by 90 degrees."
    shifted = f"Position 0 gets the angles of {shift}."
    for law in (
        right,
        backwards,
        replace(right, kind="swapped", code="cos-and-sin-swapped", says=swapped),
        replace(right, shift=shift, code="positions-off-by-one", says=shifted),
    ):
        if law.explains(multipliers, positions):
            return law
    says = "Position 1 gets the angles of 0, and 0 those of the last of a table. No more was judged."
    before = replace(right, shift=-1, code="positions-off-by-one", says=says)
    if before.explains(multipliers[1:], positions[1:]):
        return before
    for law in (replace(right, factor=rope.attention_factor), right, backwards):
        if (rounding := find_rounding(multipliers, positions, law)) is not None:
            code, says = rounding
            if law.code is not None:
                code, says = law.code, f"{law.says} The {code.rpartition('-')[2]} are rounded to 16 bits, too."
            return replace(law, code=code, says=says)
    bugs = [(bug, says, np.asarray(wrong)) for bug, says, wrong in _wrong_frequencies(rope, head_dim, is_fitted)]
    for bug, says, wrong in bugs:
        for kind in (right, backwards):
            law = replace(kind, inv_freq=moving(wrong), code=bug, says=f"{says} {kind.says}".rstrip())
            if len(law.inv_freq) == len(expected) and law.explains(multipliers, positions):
                return law
    if measured.code is not None:
        return measured
    for bug, says, wrong in bugs:
        is_ramp = np.isnan(wrong).any() and len(wrong) == len(inv_freq)
        if is_ramp and np.nanmax(np.abs(inv_freq.abs().numpy() / wrong - 1)) < 1e-3:
            return replace(measured, code=bug, says=says)
    ratios = inv_freq.abs() / expected
    if rope.scaling is not None and len(ratios) > 1:
        base = round_digits(float(rope.base * ratios[1] ** (-rope.rotary_dim / 2)))  # which pair 1 shows
        base = base if 1 < base < 1e12 else rope.base
        law = replace(right, inv_freq=moving(replace(rope, base=base).inv_freq))
        if len(law.inv_freq) == len(expected) and law.explains(multipliers, positions):
            return replace(law, code="wrong-base", says=f"The base is {base:.10g} instead of {rope.base:.10g}.")
    fitted = fit_base(inv_freq, rope.rotary_dim, axes=rope.axes)
    if fitted is not None and abs(fitted[1] - 1) < 1e-4 and abs(fitted[0] / rope.base - 1) > _FITTED:
        (base, _), dim = fitted, rope.rotary_dim
        size = dim * math.log(rope.base) / math.log(base)
        if abs(float(f"{base:.2g}") / base - 1) > 1e-4 and abs(size - round(size)) < 4e-3 and rope.axes is None:
            says = _of_size(rope, round(size))
            return replace(measured, code="wrong-exponent", says=f"{says} {measured.says}".rstrip())
        return replace(measured, code="wrong-base", says=f"The base is {base:.10g} instead of {rope.base:.10g}.")
    i = int(ratios.clamp(min=1e-30).log().abs().argmax())
    if rope.scaling is None and ratios[-1] < 0.999 and bool((ratios.diff() < 1e-3).all()):
        says = f"A scaling is applied that was not asked for: the slowest pair is {1 / ratios[-1]:.4g} times slower."
    elif abs(float(ratios[i]) - 1) < 1e-4 and bool((other := (inv_freq < 0) != (expected < 0)).any()):
        pairs = other.nonzero().flatten().tolist()
        listed = f"{', '.join(map(str, pairs[:4]))}{', …' if len(pairs) > 4 else ''}"
        return replace(measured, code="rotates-backwards", says=f"Of the pairs, {listed} rotate by minus their angle.")
    elif abs(float(ratios[i]) - 1) < 1e-4:
        first = int((right.excess(multipliers, positions) > 1).any(-1).nonzero()[0])
        says = right.describe_error(multipliers[first], positions[first])
    else:
        says = f"Pair {i} has {ratios[i]:.4g} times the expected frequency of {expected[i]:.4g} radians per token."
    return replace(measured, code="wrong-frequencies", says=says)


BACKWARDS = "Every pair is rotated by minus its angle. This is right only for weights that were trained with it."


def find_rounding(z: Tensor, positions: Tensor, law: Law) -> tuple[str, str] | None:
    """Return the code and the description of a rounding to 16 bits that explains how multipliers differ, or None."""
    for dtype, name in NAMES.items():
        if (what := _find_rounded(z, positions, law, dtype)) is not None:
            at = f"At position {int(positions[-1]):,} they" if what == "positions" else "They"
            tf32 = " (or to TF32, the precision of matrix products on a GPU)"
            like = tf32 if (what, name) == ("frequencies", "float16") else ""
            return f"low-precision-{what}", f"{at} are rounded to {name}{like}."
    return None


def _find_rounded(z: Tensor, positions: Tensor, law: Law, dtype: torch.dtype) -> str | None:
    """Return what was rounded to `dtype`: "tables", "positions", "frequencies", "angles" or None.

    No rounding is predicted, since code may round several steps. Instead, the measured angles are compared with the
    numbers of that dtype: rounded angles are such numbers, and so are rounded frequencies.
    """

    def rounded(t: Tensor) -> Tensor:
        return t.float().to(dtype).to(torch.float64)

    tokens = (positions + law.shift).to(torch.float64)[:, None]
    angles = tokens * law.inv_freq
    off = (z / law.of(angles)).angle() * (1 if law.kind == "plain" else -1)
    in_tables = any(bool((rounded(t) == t).all()) for t in (z.real, z.imag))  # or one of the two
    unit, sizes = torch.finfo(dtype).eps / 2, law.inv_freq.abs()
    noise = law.bound(positions) + 1.5 * unit * in_tables
    roundings = 3 + float((sizes.max() / sizes.min()).log())  # three, and one of the exponents
    limit = unit * roundings * angles.abs() + noise
    clear = (limit < 3) & (angles != 0)  # the measured angle is known, and not only modulo a turn

    def explains(angles: Tensor) -> Tensor:
        close: Tensor = (z - law.of(angles)).abs() <= noise * law.factor
        return close

    if not bool((off.abs() <= limit)[clear].all()):
        return None
    if in_tables and bool(explains(angles).all()):
        return "tables"
    if bool((rounded(tokens) != tokens).any()) and bool(explains(rounded(tokens) * law.inv_freq).all()):
        return "positions"
    if not bool((clear & (unit * angles.abs() > 2 * noise)).any()):
        return None  # the numbers of this dtype are too close to each other
    measured, last = angles + off, (clear * tokens).argmax(0)
    frequencies = (law.inv_freq, (measured / tokens)[last, torch.arange(len(last))])
    candidates = [rounded(each) for each in frequencies]
    base = law.inv_freq[1:2] ** -len(sizes)
    if abs(float(rounded(base) / base) - 1) > 1e-5:
        candidates.append(law.inv_freq ** (rounded(base).log() / base.log()))  # as if the base was rounded
    if any(bool(explains(tokens * each)[clear].all()) for each in candidates):
        return "frequencies"
    return "angles" if bool(explains(rounded(measured))[clear].all()) else None


def _wrong_frequencies(
    rope: Rope, head_dim: int, is_fitted: bool
) -> Iterator[tuple[str, str, Sequence[float] | np.ndarray]]:
    """Yield the code, the description and inv_freq of each known bug in the frequencies, as `Scaling.known_bugs`."""
    dim, scaling = rope.rotary_dim, rope.scaling
    steps = np.arange(0, dim, 2)
    yield "rotated-twice", "Position 1 has the angles of position 2.", 2 * rope.inv_freq
    yield "frequencies-reversed", "The first pair has the frequency of the last.", rope.inv_freq[::-1]
    plain = replace(rope, scaling=None).inv_freq
    if scaling is not None:
        yield "scaling-ignored", f"The frequencies are those of base {rope.base:.10g} without any scaling.", plain
        factor = getattr(scaling, "factor", None) or getattr(scaling, "alpha", None)
        if factor is not None:
            kept = (rope.inv_freq / plain - 1 / factor) / (1 - 1 / factor) if factor != 1 else 1.0  # of each pair
            wrong = plain * (kept + (1 - kept) * factor)
            yield "scaling-inverted", f"They are multiplied by {factor:g} instead of divided.", wrong
            wrong = plain * (kept + (1 - kept) * factor ** (-steps / dim))
            yield "wrong-frequencies", f"The base is multiplied by {factor:g}, and they are not divided by it.", wrong
        yield "scaling-twice", "They are scaled twice.", rope.inv_freq**2 / plain
        yield from scaling.known_bugs(rope.base, dim)
        for key, powers in (("factor", range(1, 8)), ("original_max_position_embeddings", range(9, 21))):
            for n in powers if rope.is_static and key in scaling.facts() else ():
                other = replace(scaling, **{key: 2**n})  # type: ignore[type-var]
                says = f"They are those of {key} {2**n} instead of {getattr(scaling, key):g}."
                yield "wrong-frequencies", says, replace(rope, scaling=other).inv_freq
    if rope.base != 10_000.0:
        says = f"The base is 10000 instead of {rope.base:.10g}."
        yield "wrong-base", says, replace(rope, base=10_000.0).inv_freq
    if dim != head_dim:
        says = f"The exponents are 2i/{head_dim}, but {dim} channels are rotated."
        yield "frequencies-over-head-dim", says, rope.base ** (-steps / head_dim)
    turn = rope.inv_freq != 0
    sizes = dim // 2, 2 * dim, 2 * np.count_nonzero(turn)
    for size in sizes if rope.axes is None else (dim // 2,):  # not twice, since base 100 is usual for axes
        if size > 0:
            yield "wrong-exponent", _of_size(rope, int(size)), turn * plain ** (dim / size)
    for k in (-2, 1, 2) if scaling is None and rope.axes is None and not is_fitted else ():  # as if they were divided
        says = f"The exponents are (2i{k:+})/{dim} instead of 2i/{dim}."
        yield "wrong-exponent", says, plain * rope.base ** (-k / dim)
    yield "wrong-exponent", "The exponents have no minus sign.", turn / plain
    if scaling is not None:
        yield "wrong-exponent", "Positions are divided by the frequencies.", turn / np.where(turn, rope.inv_freq, 1.0)
    for times in (1, dim, head_dim) if rope.axes is None else ():
        says = "The exponents are not divided by the number of channels" + ", but the frequencies are" * (times > 1)
        yield "wrong-exponent", f"{says}.", times * plain**dim


def _of_size(rope: Rope, size: int) -> str:
    """Return what is said of exponents that are divided by another number of channels."""
    says = f"The exponents are 2i/{size}, but {rope.rotary_dim} channels are rotated."
    says = says if rope.axes is None else "The exponents are twice as large as they should be."
    return f"{says} This equals base {rope.base ** (rope.rotary_dim / size):.6g}."


def measure_frequencies(multipliers: Tensor, positions: Tensor) -> Tensor:
    """Measure the radians per token of each pair, between ±π, from the first two tokens."""
    return (multipliers[1] / multipliers[0]).angle() / int(positions[1] - positions[0])


def fit_base(
    inv_freq: Tensor, rotary_dim: int, tolerance: float = 1e-4, axes: Axes | None = None
) -> tuple[float, float] | None:
    """Fit a geometric progression, or that of each axis with one base: return its base and the divisor, or None."""
    f = inv_freq.abs().numpy()
    if len(f) < 2 or not np.isfinite(f).all() or (f <= 0).any():
        return None
    logs, steps = np.log(f), np.arange(len(f)) * 2 / rotary_dim
    if axes is not None and axes.pairs == len(f):
        steps = np.array([i / axes.lengths[a] for a, i in zip(axes.axis, axes.freq_index, strict=True)])
    slope, start = np.polyfit(steps, logs, 1)
    if np.abs(logs - (start + slope * steps)).max() > tolerance or slope > -1e-3:
        return None
    return round_digits(float(np.exp(-slope))), round_digits(float(np.exp(-start)))


def round_digits(number: float) -> float:
    """Round a number to the fewest significant digits that change it by less than 2e-5 of its value."""
    for digits in range(1, 8):
        rounded = float(f"{number:.{digits}g}")
        if abs(rounded / number - 1) < 2e-5:
            return rounded
    return number


def moving(inv_freq: np.ndarray) -> Tensor:
    """Drop the pairs with frequency 0, which are indistinguishable from channels that are not rotated."""
    return torch.from_numpy(np.array(inv_freq[inv_freq != 0], dtype=np.float64))
