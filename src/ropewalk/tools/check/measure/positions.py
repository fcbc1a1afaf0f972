"""Compare the angles with the law at large positions, in long sequences and in 16 bits, and name the bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure.baseline import Baseline
from ropewalk.tools.check.measure.case import usual
from ropewalk.tools.check.measure.law import NAMES, find_rounding, moving

REPORTED = (127, 4_095, 32_767, 131_071, 1_048_575)
FARTHEST = 1_048_575
LONGEST_CALL = 8_192  # tokens of one call, if positions cannot be passed


def judge_far(baseline: Baseline) -> None:
    """Compare the angles at large positions with the law, and name the bug at the first position that differs."""
    law, report = baseline.law, baseline.report
    errors: dict[int, tuple[float, float]] = {}
    table_end: str | None = None
    for positions in _probes(baseline):
        try:
            z = baseline.measure(positions)
        except CallError as e:
            table_end = table_end or f"fails at position {int(positions[-1])}: {e}"
            if e.code != "raises":
                report.add(e.code, f"At positions up to {int(positions[-1]):,}: {e}.")
            continue
        wrong = (law.excess(z, positions) > 1).any(-1)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            # Judge the next token if it is also wrong. If a table wraps around, the first wrong token has the angles of
            # position 0, which are also those of an unrotated token.
            token = first + int(first + 1 < len(wrong) and bool(wrong[first + 1]))
            code, says = name_bug(baseline, z, positions, token, right=int(positions[first]) - 1)
            if int(wrong.sum()) == 1 and not bool(wrong[-1]):
                code, says = "wrong-far-positions", f"{says} The next position is right."
            if code == "wrong-far-positions" and is_beyond_length(baseline.subject, int(positions[first])):
                report.grade("far positions", BEYOND)
                return
            report.add(code, says)
            report.grade("far positions", f"wrong at {int(positions[first]):,}; later positions were not tried", False)
            return
        largest, pairs = ((z - law.at(positions)).abs() / law.factor).max(-1)
        limits = law.bound(positions).gather(-1, pairs[:, None])[:, 0]
        errors |= {int(p): (float(e), float(b)) for p, e, b in zip(positions, largest, limits, strict=True)}
    for p in REPORTED:
        if p in errors:
            error, limit = errors[p]
            is_exact = error < 2.0**-22 * max(1.0, 2 * law.factor)
            like = "exact to float32" if is_exact else f"allowed for float32 angles of this pair: {limit:.1e}"
            report.grade(f"error at {p:,}", f"{error:.1e} of cos and sin; {like}", True, error)
    if table_end:
        report.grade("end of the table", table_end)


def judge_length(baseline: Baseline) -> None:
    """If the scheme depends on the length, check every token of a sequence twice as long as in training.

    All of its tokens must have the frequencies and the attention factor of its length.
    """
    report, unresolved, length = baseline.report, baseline.subject.expected.unresolved, baseline.subject.expected.length
    if unresolved is None or length is None:
        return
    n = 2 * length
    rope, name = unresolved.at_length(n), f"{n:,} tokens"
    positions = torch.tensor([*range(8), *range(n // 2 - 4, n // 2 + 4), *range(n - 4, n)])
    if not baseline.subject.accepts(positions[None]):
        positions = torch.arange(n)
    if len(positions) > LONGEST_CALL:
        report.grade(name, f"not judged: positions cannot be passed, and {n:,} tokens are too many for one call")
        return
    try:
        z = baseline.measure(positions)
    except CallError as e:
        report.grade(name, f"{e}")
        if e.code != "raises":
            report.add(e.code, f"With {n:,} tokens: {e}.")
        return
    sizes, short_law = z.abs(), replace(baseline.law, factor=1.0)
    right, short = (
        (law.excess(z / sizes, positions) <= 1).all(-1)
        for law in (replace(short_law, inv_freq=moving(rope.inv_freq)), short_law)
    )
    if not bool(right.all()):
        says = "has neither its own frequencies nor those of a short one."
        if bool(short.all()):
            says = "has the frequencies of a short one."
        elif bool((right | short).all()):
            says = "has the frequencies of a short one at some of its positions, and its own at the others."
        report.add("length-ignored", f"A sequence of {n:,} tokens {says}")
        report.grade(name, "the wrong frequencies for that length", False)
        return
    is_right = bool(((sizes / rope.attention_factor - 1).abs() < 2e-3).all())
    if not is_right:
        measured = f"{float(sizes.median()):.5g} instead of {rope.attention_factor:.5g}"
        report.add("attention-factor", f"In a sequence of {n:,} tokens, cos and sin are multiplied by {measured}.")
    report.grade(name, "as expected" if is_right else "multiplied by the wrong attention factor", is_right)


def _probes(baseline: Baseline) -> Iterator[Tensor]:
    """Yield the positions to measure, `[tokens]`, in ascending order and up to which the expected rope holds."""
    subject, length = baseline.subject, baseline.subject.expected.length
    last = FARTHEST if length is None else length - 1
    if subject.way.positions in ("none", "packed"):
        for tokens in (LONGEST_CALL, 4_096, 2_048, 1_024, 512, 256, 128):
            try:
                x = torch.zeros(1, tokens, 1, subject.channels)
                subject(x, x, torch.arange(tokens)[None])
            except CallError:
                continue
            yield torch.arange(min(tokens, last + 1))
            return
        return
    table_length = _table_length(subject)
    ends = sorted({*(2**n for n in range(6, 21)), 300, 5_000, *table_length, *(n + 3 for n in table_length)})
    for end in ends:
        if end - 1 <= last:
            yield torch.arange(end - 4, end)
            if end + 4 <= last + 1 and end <= 8_192:
                yield torch.arange(end, end + 4)


def is_beyond_length(subject: Subject, position: int) -> bool:
    """Return whether a scheme that nobody has stated may have other frequencies from a position on."""
    lengths = _table_length(subject) if subject.expected.rope is None else []
    return bool(lengths) and position >= lengths[0]


BEYOND = "not judged: they change beyond the length of the constructor, as by a scheme that --config CONFIG would state"


def _table_length(subject: Subject) -> list[int]:
    """Return the length of the table that the constructor was passed, or nothing."""
    return [n for n in (subject.arguments and subject.arguments.length,) if n]


def name_bug(baseline: Baseline, z: Tensor, positions: Tensor, token: int, *, right: int = 0) -> tuple[str, str]:
    """Name the bug that explains the multipliers of one wrong token.

    Args:
        baseline: the measurement of the target.
        z: the multipliers that were measured in another call, complex128 `[tokens, pairs]`.
        positions: the positions in that call, `[tokens]`.
        token: the index of the wrong token.
        right: the largest position at which the angles are known to be right.

    Returns:
        The code of the bug, and a description in one sentence.
    """
    law, p = baseline.law, int(positions[token])
    if not bool(z[token].abs().isfinite().all()):
        return "not-finite", f"At position {p:,} the result is not finite."
    if (rounding := find_rounding(z, positions, law)) is not None:
        return rounding
    z = z[token]
    if float(z.abs().max()) < 1e-6:
        return "zeros-past-table", f"At position {p:,} the rotated channels are zero."
    if float((z - 1).abs().max()) < 1e-3:
        return "unrotated-past-table", f"The token at position {p:,} is not rotated."

    for n in sorted({p, *range(p - 3, p), *(2**n for n in range(5, 21)), *_table_length(baseline.subject)}):
        if right < n <= p:
            if law.explains(z, torch.tensor(n - 1)):
                return "table-clamps", f"Position {p:,} has the angles of {n - 1:,}, the last of a table of {n:,} rows."
            if p % n < p and law.explains(z, torch.tensor(p % n)):
                code = "table-wraps" if baseline.subject.way.positions in ("rows", "shared") else "positions-restart"
                return code, f"Position {p:,} has the angles of {p % n:,}: they repeat after {n:,} tokens."
    start = int(positions[0])
    for of_cos, of_sin in ((p, p - start), (p - start, p)):
        mixed = torch.complex(law.at(torch.tensor(of_cos)).real, law.at(torch.tensor(of_sin)).imag)
        if bool(((z - mixed).abs() <= law.factor * law.bound(positions[token])).all()):
            code = "positions-ignored" if baseline.subject.way.positions in ("rows", "shared") else "offset-ignored"
            return code, f"At position {p:,}, the cosines are those of {of_cos:,} and the sines those of {of_sin:,}."
    return "wrong-far-positions", law.describe_error(z, positions[token])


# The error that rounding explains: cos and sin, the product and the sum lose half a unit each, of numbers up to √2.
ROUNDING = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
_PROBES_16 = (0, 252, 300, 1_020, 2_044, 4_092)


def judge_16_bits(baseline: Baseline) -> None:
    """Pass q and k in bfloat16 and in float16, and check the dtype and the error of the results."""
    subject, report = baseline.subject, baseline.report
    for dtype, name in NAMES.items():
        positions = torch.arange(5)[None]
        q = usual(subject, heads=6).tensors()[0].to(dtype)
        try:
            out, _ = subject(q, q, positions)
            worst, at = _find_largest_error(baseline, subject, dtype)
        except CallError as e:
            report.add(e.code, f"With {name} tensors: {e}.")
            report.grade(f"{name} tensors", f"{e}")
            continue
        if out.dtype != dtype:
            says = f"The input is {name}, and the output is {str(out.dtype).removeprefix('torch.')}."
            report.add("wider-output" if torch.finfo(out.dtype).bits > 16 else "wrong-output-dtype", says)
        right = worst <= 1
        if not right and (found := [f.code for f in report.findings if f.severity == "wrong"]):
            report.grade(f"{name} tensors", f"not judged: {found[0]}")
            continue
        if not right:
            rounded = replace(baseline.law, noise=ROUNDING[dtype])
            code, says = name_bug(replace(baseline, law=rounded), *at)
            report.add(code, f"With {name} tensors: {says[0].lower()}{says[1:]}")
        says = f"cos and sin have {worst:.2g} times the error that rounding explains, at position {at[1][at[2]]:,}"
        report.grade(f"{name} tensors", says, right)
    if report.verdict == "right" and subject.way.given is None:
        with torch.autocast(memory.current().device.type, dtype=torch.bfloat16):
            lost = _grade_angles(baseline, subject, "under autocast")
        if lost and report.verdict == "right":
            report.add("lost-by-autocast", f"Under autocast, {lost}.")


def judge_cast(baseline: Baseline) -> None:
    """Cast the module as `model.bfloat16()` does, and check its angles."""
    if baseline.subject.rebuild is None or (subject := baseline.subject.rebuild()).module is None:
        return
    subject.module.to(torch.bfloat16)
    _grade_angles(baseline, subject, "after .bfloat16()")


def _grade_angles(baseline: Baseline, subject: Subject, when: str) -> str:
    """Return how the angles have a larger error than rounding q and k to bfloat16 explains. If not so, return ""."""
    report, law = baseline.report, baseline.law
    try:
        worst, (z, positions, token) = _find_largest_error(baseline, subject, torch.bfloat16)
    except CallError as e:
        report.grade(when, f"{e}")
        return ""
    p, far = int(positions[token]), float((z - law.at(positions))[token].abs().max()) / law.factor
    lost = f"cos and sin at position {p:,} are off by {far:.2g}" if worst > 1 else ""
    report.grade(when, f"the angles are rounded: {lost}" if lost else "as expected", None if lost else True)
    return lost


def _find_largest_error(
    baseline: Baseline, subject: Subject, dtype: torch.dtype
) -> tuple[float, tuple[Tensor, Tensor, int]]:
    """Find the largest error, as a multiple of the error that rounding explains.

    Returns:
        That multiple, and where it occurs: the measured multipliers `[tokens, pairs]`, their positions, and the index
        of the token.
    """
    law = baseline.law
    worst, at = 0.0, (baseline.multipliers[:1], torch.arange(1), 0)
    for positions in _probes_of_16_bits(baseline):
        z = baseline.measure(positions, dtype, subject)
        limits = ROUNDING[dtype] + law.bound(positions)
        parts = ((z - law.at(positions)).abs() / law.factor / limits).amax(-1).nan_to_num(nan=torch.inf)
        if float(parts.max()) > worst:
            worst, at = float(parts.max()), (z, positions, int(parts.argmax()))
    return worst, at


def _probes_of_16_bits(baseline: Baseline) -> list[Tensor]:
    """Return the positions to measure in 16 bits, `[tokens]` each: those that the target accepts in float32."""
    subject = baseline.subject

    def is_accepted(positions: Tensor) -> bool:
        try:
            baseline.measure(positions)
        except CallError:
            return False
        return True

    if subject.way.given is not None or subject.way.positions in ("none", "packed"):
        return [torch.arange(64 if subject.way.given is not None else 512)]
    last = baseline.subject.expected.length or 10**9
    if any(grade.says == BEYOND for grade in baseline.report.grades):
        last = min(last, *_table_length(subject))
    probes = (*_PROBES_16, *_table_length(subject))  # beyond a table, code builds another one
    return [positions for p in probes if p + 4 <= last and is_accepted(positions := torch.arange(p, p + 4))]
