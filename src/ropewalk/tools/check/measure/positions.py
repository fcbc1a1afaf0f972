"""Compare the angles with the law at large positions, in long sequences and in 16 bits, and name the bugs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CLOSE, ROUNDING, CallError, Subject
from ropewalk.tools.check.measure.baseline import SMALL, Baseline
from ropewalk.tools.check.measure.case import KNOWN, usual
from ropewalk.tools.check.measure.law import NAMES, find_rounding, moving

REPORTED = (127, 4_095, 32_767, 131_071, 1_048_575)
LONGEST_CALL = 8_192  # tokens of one call, if positions cannot be passed


def _measure_far(
    baseline: Baseline, dtype: torch.dtype = torch.float32
) -> tuple[tuple[str, str] | None, dict[int, tuple[float, float]], str]:
    """Compare the angles at large positions with the law. In 16 bits, the rounding of cos, sin and x is no error.

    Return the bug at the first position that differs, or None; the largest error of cos and sin at each position
    before, and that which float32 explains; and why nothing is known past the end of a table, or "".
    """
    law = replace(baseline.law, noise=ROUNDING.get(dtype, baseline.law.noise))
    errors: dict[int, tuple[float, float]] = {}
    end, fault = "", None
    for positions in _probes(baseline, LONGEST_CALL if dtype == torch.float32 else 512):
        try:
            z = baseline.measure(positions, dtype)
        except CallError as e:
            if e.code != "raises":
                return (e.code, f"At positions up to {int(positions[-1]):,}: {e}."), errors, end
            end = end or f"fails at position {int(positions[-1])}: {e}"
            continue
        wrong = (law.excess(z, positions) > 1).any(-1)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            # Judge the next token if it is also wrong. If a table wraps around, the first wrong token has the angles of
            # position 0, which are also those of an unrotated token.
            token = first + int(first + 1 < len(wrong) and bool(wrong[first + 1]))
            right = int(positions[first - 1]) if first else max(errors, default=KNOWN - 1)
            code, says = name_bug(replace(baseline, law=law), z, positions, token, right=right)
            if int(wrong.sum()) == 1 and not bool(wrong[-1]):
                code, says = "wrong-far-positions", f"{says} The next position is right."
            is_shifted = re.search(r"has the angles of [\d,]+\.$", says)  # by whole positions, as no scheme does
            is_beyond = not is_shifted and is_beyond_length(baseline.subject, int(positions[first]))
            if code == "wrong-far-positions" and is_beyond:
                return None, errors, BEYOND
            clamped = bool((z[wrong] - z[wrong][:1]).abs().max() < CLOSE) and code == "table-clamps"
            if clamped and baseline.subject.form.library == "jax":  # each token by itself, as all of its indexing is
                return None, errors, f"clamped, as JAX does: {says}"
            if code == "table-clamps" and baseline.subject.way.positions == "offset":
                try:  # or only the last row of a slice is broadcast, and farther on calls fail
                    baseline.measure(positions + len(positions), dtype)
                except CallError as e:
                    return None, errors, f"fails past position {int(positions[first]) - 1}: {e}"
            fault = fault or (code, says)
            if dtype in ROUNDING and code in ("low-precision-tables", "wrong-far-positions") and positions[-1] < 4_096:
                continue  # farther on, the cause may be clearer
            return (code, says), errors, end
        largest, pairs = ((z - law.at(positions)).abs() / law.factor).max(-1)
        limits = law.bound(positions).gather(-1, pairs[:, None])[:, 0]
        errors |= {int(p): (float(e), float(b)) for p, e, b in zip(positions, largest, limits, strict=True)}
    return fault, errors, end


def judge_far(baseline: Baseline) -> bool | str:
    """Compare the angles at large positions with the law, and name the bug at the first position that differs."""
    law, report = baseline.law, baseline.report
    if not law.explains(baseline.multipliers, SMALL):
        return "not judged: no law explains the angles at positions 0 to 63"
    fault, errors, end = _measure_far(baseline)
    if fault is not None:
        of_a_shift = {"wrong-far-positions", "table-clamps"}  # as of a table of one row less
        if fault[0] not in of_a_shift or "positions-off-by-one" not in report.codes:
            report.add(*fault)
        return True
    for p in (p for p in REPORTED if p in errors):
        error, limit = errors[p]
        is_exact = error < 2.0**-22 * max(1.0, 2 * law.factor)
        like = "exact to float32" if is_exact else f"allowed for float32 angles of this pair: {limit:.1e}"
        report.grade(f"error at {p:,}", f"{error:.1e} of cos and sin; {like}", True, error)
    return end or True


def judge_length(baseline: Baseline) -> bool | str:
    """Check that all tokens of sequences longer than in training have the frequencies of their length."""
    report, unresolved, length = baseline.report, baseline.subject.expected.unresolved, baseline.subject.expected.length
    if unresolved is None or length is None or baseline.law.code not in (None, "length-ignored", *report.ignored):
        return False
    if rounded := [code for code in report.codes if code.startswith("low-precision")]:
        return f"not judged: {rounded[0]}"
    before = report.codes
    for n in (length + 8, 2 * length):  # some code keeps the frequencies of the longest sequence
        tried = _judge_length(baseline, unresolved, length, n)
        if tried is not True or report.codes != before:
            break
    return tried


def _judge_length(baseline: Baseline, unresolved: Rope, length: int, n: int) -> bool | str:
    """As `judge_length`, for a sequence of n tokens, of which training had at most `length`."""
    report, rope = baseline.report, unresolved.at_length(n)
    positions = torch.tensor([*range(8), *range(n // 2 - 4, n // 2 + 4), *range(n - 4, n)])
    if not baseline.subject.accepts(positions[None]):
        positions = torch.arange(n)
    if len(positions) > LONGEST_CALL:
        return f"not judged: positions cannot be passed, and {n:,} tokens are too many for one call"
    z = baseline.measure(positions)
    sizes, measured = z.abs(), replace(baseline.law, factor=1.0)
    of_long, of_short = (replace(measured, inv_freq=moving(r.inv_freq)) for r in (rope, unresolved.at_length(length)))
    right, short = ((law.excess(z / sizes, positions) <= 1).all(-1) for law in (of_long, of_short))
    if baseline.law.code == "length-ignored":  # a short sequence has the frequencies of a long one
        if bool(short.all()):
            report.drop("length-ignored", "wrong-far-positions")
            says = f"A sequence of {n:,} tokens has the frequencies of a short one, which has those of a long one."
            report.add("lengths-exchanged", says)
        return True
    if not bool(right.all()):
        says = "has the frequencies of a short one" if bool(short.all()) else "has other frequencies than its own"
        report.add("length-ignored", f"A sequence of {n:,} tokens {says}. Training ended at {length:,}.")
    elif not bool(((sizes / rope.attention_factor - 1).abs() < 2e-3 + baseline.subject.noise).all()):
        says = f"{float(sizes.median()):.5g} instead of {rope.attention_factor:.5g}"
        report.add("attention-factor", f"In a sequence of {n:,} tokens, cos and sin are multiplied by {says}.")
    return True


def _probes(baseline: Baseline, longest: int) -> Iterator[Tensor]:
    """Yield the positions to measure, `[tokens]`, in ascending order and up to which the expected rope holds."""
    subject, length = baseline.subject, baseline.subject.expected.length
    if subject.way.given is not None:
        yield torch.arange(KNOWN)
        return
    last = REPORTED[-1] if length is None else length - 1
    if subject.way.positions in ("none", "packed"):
        for tokens in (n for n in (8_192, 4_096, 2_048, 1_024, 512, 256, 128) if n <= longest):
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
    if longest < LONGEST_CALL:  # rounding to 16 bits shows up to there
        last = min(last, 2**16)
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
    """Return the code and a description of the bug that explains multipliers `[tokens, pairs]` of one wrong token.

    The angles are known to be right up to position `right`.
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

    for bits in (16, 8):
        signed = (p + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        if signed < 0 and law.explains(z, torch.tensor(signed)):
            return "positions-overflow", f"Position {p:,} has the angles of {signed:,}, as if kept in {bits} bits."
    for n in sorted({p, *range(p - 3, p), *(2**n for n in range(5, 21)), *_table_length(baseline.subject)}):
        if max(right, 0) < n <= p:
            if law.explains(z, torch.tensor(n - 1)):
                return "table-clamps", f"Position {p:,} has the angles of {n - 1:,}, the last of a table of {n:,} rows."
            if p % n < p and law.explains(z, torch.tensor(p % n)):
                code = "table-wraps" if baseline.subject.way.positions in ("rows", "shared") else "positions-restart"
                return code, f"Position {p:,} has the angles of {p % n:,}: they repeat after {n:,} tokens."
    slow = int(law.inv_freq.abs().argmin())
    farther = float(z[slow].angle() / law.inv_freq[slow])
    if farther > p + 1 and law.explains(z, torch.tensor(farther)):
        says = f"Position {p:,} has the angles of {farther:,.0f}, as without a scale that holds up to there."
        return "wrong-far-positions", says
    for other in range(p - 1, max(p - 64, 0), -1):
        if law.explains(z, torch.tensor(other)):
            return "wrong-far-positions", f"Position {p:,} has the angles of {other:,}."
    return "wrong-far-positions", law.describe_error(z, positions[token])


def judge_16_bits(baseline: Baseline, dtype: torch.dtype) -> bool | str:
    """Pass q and k in bfloat16 or float16, and check the dtype and the error of the results."""
    subject, report, name = baseline.new_subject(dtype=dtype), baseline.report, NAMES[dtype]
    baseline = replace(baseline, subject=subject)
    q = usual(subject, heads=6).tensors()[0].to(dtype)
    out, _ = subject(q, q, torch.arange(5)[None])
    if out.dtype != dtype:
        says = f"The input is {name}, and the output is {str(out.dtype).removeprefix('torch.')}."
        report.add("wider-output" if torch.finfo(out.dtype).bits > 16 else "wrong-output-dtype", says)
    found = [f.code for f in report.findings if f.severity == "wrong"]
    if (fault := _measure_far(baseline, dtype)[0]) is not None:
        if found and not (fault[0].startswith("low-precision") and all("table" in code for code in found)):
            return f"not judged: {found[0]}"
        report.add(fault[0], f"With {name} tensors: {fault[1][0].lower()}{fault[1][1:]}")
    return True


def judge_autocast(baseline: Baseline) -> bool:
    """Check the angles under `torch.autocast`."""
    if baseline.report.verdict == "wrong" or baseline.subject.way.given is not None:
        return False
    with torch.autocast(memory.current().device.type, dtype=torch.bfloat16):
        fault = _measure_far(baseline, torch.bfloat16)[0]
    if fault is not None:
        baseline.report.add("lost-by-autocast", f"Under autocast: {fault[1]}")
    return True
