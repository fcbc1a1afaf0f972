"""Check the angles at large positions, up to 1,048,575, and name the bug if they are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk.conformance.law import Law, largest_error
from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import CallError, Subject

REPORTED = (127, 4_095, 32_767, 131_071, 1_048_575)
FARTHEST = 1_048_575
LONGEST_CALL = 8_192  # tokens of one call, if positions cannot be passed


def float32_error(position: int) -> float:
    """Return the error of cos and sin that float32 explains: a rounded frequency and a rounded product, with a margin.

    At position 1,048,575, float32 code was measured to be off by 0.03 to 0.09 if it computes each frequency as a power
    of the base, and by 0.16 if it computes each frequency from the previous one. The limit there is 0.25.
    """
    return 2e-5 + 4 * position * 2.0**-24


def measure(
    subject: Subject, structure: Structure, channels: int, positions: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Measure the multiplier of each pair at positions `[batch, seq]`, complex128 `[batch, seq, pairs]`."""
    x = structure.unit_input(channels).to(dtype).expand(*positions.shape, 2, channels).contiguous()
    out, _ = subject(x, x.clone(), positions)
    return structure.multipliers(out)[:, :, 0]


def judge(subject: Subject, structure: Structure, channels: int, law: Law, report: Report, length: int | None) -> None:
    """Compare the angles at large positions with the law, and name the bug at the first position that differs.

    Args:
        subject, structure, channels: the target, its pairs, and the number of channels of a head.
        law: the law of the angles at small positions.
        report: receives the findings and grades.
        length: the number of tokens up to which the law holds, or None if it holds for every number.
    """
    errors: dict[int, float] = {}
    table_end: str | None = None
    for positions in _probes(subject, length):
        try:
            z = measure(subject, structure, channels, positions[None])[0]
        except CallError as e:
            table_end = table_end or f"raises at position {int(positions[-1])}: {e}"
            continue
        errors_here = (z - law.at(positions)).abs().amax(-1) / law.factor
        limits = torch.tensor([float32_error(int(p)) for p in positions], dtype=torch.float64)
        wrong = ~(errors_here <= limits)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            # Judge the next token if it is also wrong. If a table wraps around, the first wrong token has the angles of
            # position 0, which are also those of an unrotated token.
            token = first + int(first + 1 < len(wrong) and bool(wrong[first + 1]))
            code, says = name_bug(z[token], int(positions[token]), law, subject, right=int(positions[first]) - 1)
            if int(wrong.sum()) == 1 and not bool(wrong[-1]):
                code, says = "wrong-far-positions", f"{says} The next position is right."
            report.add(code, says)
            report.grade("far positions", f"wrong at {int(positions[first]):,}; later positions were not tried", False)
            return
        errors |= {int(p): float(e) for p, e in zip(positions, errors_here, strict=True)}
    for p in REPORTED:
        if p in errors:
            exact = 2.0**-24 * max(1.0, 2 * law.factor)
            like = "exact to float32" if errors[p] < 4 * exact else f"float32 angles lose up to {float32_error(p):.1e}"
            report.grade(f"error at {p:,}", f"{errors[p]:.1e} of cos and sin; {like}", True, errors[p])
    if table_end:
        report.grade("end of the table", table_end)


def judge_length(
    subject: Subject, structure: Structure, channels: int, law: Law, report: Report, rope: Rope, n: int
) -> None:
    """Check that a sequence of n tokens is rotated with the frequencies and the attention factor of `rope`."""
    positions = torch.arange(n - 4, n)
    if not subject.accepts(positions[None]):
        return
    try:
        z = measure(subject, structure, channels, positions[None])[0]
    except CallError as e:
        report.grade(f"{n:,} tokens", f"raises: {e}")
        return
    sizes, expected_factor = z.abs(), rope.attention_factor
    directions, short_law = z / sizes, replace(law, factor=1.0)
    moving = torch.from_numpy(rope.inv_freq[rope.inv_freq != 0].copy())
    right = replace(short_law, inv_freq=moving).error(directions, positions) < float32_error(n)
    if not right:
        same = short_law.error(directions, positions) < float32_error(n)
        says = (
            "has the frequencies of a short one."
            if same
            else "has neither its own frequencies nor those of a short one."
        )
        report.add("length-ignored", f"A sequence of {n:,} tokens {says}")
        report.grade(f"{n:,} tokens", "the wrong frequencies for that length", False)
        return
    right = bool(((sizes / expected_factor - 1).abs() < 2e-3).all())
    if not right:
        measured = f"{float(sizes.median()):.5g} instead of {expected_factor:.5g}"
        report.add("attention-factor", f"In a sequence of {n:,} tokens, cos and sin are multiplied by {measured}.")
    report.grade(f"{n:,} tokens", "as expected" if right else "multiplied by the wrong attention factor", right)


def _probes(subject: Subject, length: int | None) -> Iterator[Tensor]:
    """Yield the positions to measure, `[tokens]`, in ascending order and below `length`."""
    last = FARTHEST if length is None else length - 1
    if subject.positions == "none":
        for tokens in (LONGEST_CALL, 4_096, 2_048, 1_024, 512, 256, 128):
            try:
                x = torch.zeros(1, tokens, 1, subject.channels)
                subject(x, x, torch.arange(tokens)[None])
            except CallError:
                continue
            yield torch.arange(min(tokens, last + 1))
            return
        return
    table_length = subject.arguments.length if subject.arguments is not None else None
    ends = sorted(
        {*(2**n for n in range(6, 21)), 300, 5_000, *((table_length, table_length + 3) if table_length else ())}
    )
    for end in ends:
        if end - 1 <= last:
            yield torch.arange(end - 4, end)
            if end + 4 <= last + 1 and end <= 8_192:
                yield torch.arange(end, end + 4)


def name_bug(z: Tensor, p: int, law: Law, subject: Subject, *, right: int = 0) -> tuple[str, str]:
    """Name the bug that explains the multipliers at one position.

    Args:
        z: the measured multipliers, complex128 `[pairs]`.
        p: the position.
        law: the law of the angles at small positions.
        subject: the target.
        right: the largest position at which the angles are known to be right.

    Returns:
        The code of the bug, and a description in one sentence.
    """
    if not bool(z.abs().isfinite().all()):
        return "not-finite", f"At position {p:,} the result is not finite."
    position = torch.tensor(p)
    for rounding in ("positions", "angles", "frequencies"):
        for dtype in (torch.bfloat16, torch.float16):
            if largest_error(z, replace(law, rounding=rounding, dtype=dtype).at(position), law.factor) < 0.02:
                short = str(dtype).removeprefix("torch.")
                return f"low-precision-{rounding}", f"At position {p:,} they are rounded to {short}."
    if float(z.abs().max()) < 1e-6:
        return "zeros-past-table", f"At position {p:,} the rotated channels are zero."
    if largest_error(z, torch.ones_like(z), 1.0) < 1e-3:
        return "unrotated-past-table", f"The token at position {p:,} is not rotated."
    lengths = sorted(
        {
            p,
            *range(p - 3, p),
            *(2**n for n in range(5, 21)),
            *((subject.arguments.length,) if subject.arguments and subject.arguments.length else ()),
        }
    )
    for n in lengths:
        if right < n <= p:
            if largest_error(z, law.at(torch.tensor(n - 1)), law.factor) < float32_error(n):
                return "table-clamps", f"Position {p:,} has the angles of {n - 1:,}, the last of a table of {n:,} rows."
            if p % n < p and largest_error(z, law.at(torch.tensor(p % n)), law.factor) < float32_error(n):
                code = "table-wraps" if subject.positions in ("rows", "shared") else "positions-restart"
                return code, f"Position {p:,} has the angles of {p % n:,}: they repeat after {n:,} tokens."
    off = largest_error(z, law.at(position), law.factor)
    says = f"At position {p:,}, cos and sin are off by {off:.2g}. Float32 explains at most {float32_error(p):.1e}."
    return "wrong-far-positions", says
