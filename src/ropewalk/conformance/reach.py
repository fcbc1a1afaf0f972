"""Judge the angles of far tokens, up to position 1,048,575, and name what is wrong with them."""

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

SHOWN = (127, 4_095, 32_767, 131_071, 1_048_575)
FARTHEST = 1_048_575
AT_ONCE = 8_192  # tokens of one call, if positions cannot be passed


def float32_error(position: int) -> float:
    """The error of cos and sin that float32 explains: a rounded frequency and a rounded product, with a margin.

    Measured at 1,048,575: 0.03 to 0.09 if each frequency is a power of the base, and 0.16 if each is computed from the
    one before it.
    """
    return 2e-5 + 4 * position * 2.0**-24


def measure(
    subject: Subject, structure: Structure, channels: int, positions: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Measure the multiplier of each pair at these positions: `[batch, seq]` → complex128 `[batch, seq, pairs]`."""
    x = structure.unit_input(channels).to(dtype).expand(*positions.shape, 2, channels).contiguous()
    out, _ = subject(x, x.clone(), positions)
    return structure.multipliers(out)[:, :, 0]


def judge(subject: Subject, structure: Structure, channels: int, law: Law, report: Report, length: int | None) -> None:
    """Compare far tokens with the law, and name the bug of the first one that differs."""
    errors: dict[int, float] = {}
    ends: str | None = None
    for positions in _probes(subject, length):
        try:
            z = measure(subject, structure, channels, positions[None])[0]
        except CallError as e:
            ends = ends or f"raises at position {int(positions[-1])}: {e}"
            continue
        far = (z - law.at(positions)).abs().amax(-1) / law.factor
        limits = torch.tensor([float32_error(int(p)) for p in positions], dtype=torch.float64)
        wrong = ~(far <= limits)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            # The next token, if it is wrong as well: a table that wraps around gives the first one the angles of 0.
            at = first + int(first + 1 < len(wrong) and bool(wrong[first + 1]))
            code, says = name_bug(z[at], int(positions[at]), law, subject, right=int(positions[first]) - 1)
            if int(wrong.sum()) == 1 and not bool(wrong[-1]):
                code, says = "wrong-far-positions", f"{says} The next one is right."
            report.add(code, says)
            report.grade("far positions", f"wrong at {int(positions[first]):,}, after which none was tried", False)
            return
        errors |= {int(p): float(e) for p, e in zip(positions, far, strict=True)}
    for p in SHOWN:
        if p in errors:
            exact = 2.0**-24 * max(1.0, 2 * law.factor)
            like = "exact to float32" if errors[p] < 4 * exact else f"float32 angles lose up to {float32_error(p):.1e}"
            report.grade(f"error at {p:,}", f"{errors[p]:.1e} of cos and sin; {like}", True, errors[p])
    if ends:
        report.grade("end of the table", ends)


def judge_length(
    subject: Subject, structure: Structure, channels: int, law: Law, report: Report, rope: Rope, n: int
) -> None:
    """Judge a sequence of n tokens, for which the frequencies should be those of `rope`."""
    positions = torch.arange(n - 4, n)
    if not subject.accepts(positions[None]):
        return
    try:
        z = measure(subject, structure, channels, positions[None])[0]
    except CallError as e:
        report.grade(f"{n:,} tokens", f"raises: {e}")
        return
    sizes, wanted = z.abs(), rope.attention_factor
    directions, short = z / sizes, replace(law, factor=1.0)
    moving = torch.from_numpy(rope.inv_freq[rope.inv_freq != 0].copy())
    right = replace(short, inv_freq=moving).error(directions, positions) < float32_error(n)
    if not right:
        same = short.error(directions, positions) < float32_error(n)
        says = (
            "has the frequencies of a short one."
            if same
            else "has neither its own frequencies nor those of a short one."
        )
        report.add("length-ignored", f"A sequence of {n:,} tokens {says}")
        report.grade(f"{n:,} tokens", "the wrong frequencies for that length", False)
        return
    right = bool(((sizes / wanted - 1).abs() < 2e-3).all())
    if not right:
        found = f"{float(sizes.median()):.5g} instead of {wanted:.5g}"
        report.add("attention-factor", f"In a sequence of {n:,} tokens, cos and sin are multiplied by {found}.")
    report.grade(f"{n:,} tokens", "as expected" if right else "multiplied by the wrong attention factor", right)


def _probes(subject: Subject, length: int | None) -> Iterator[Tensor]:
    last = FARTHEST if length is None else length - 1
    if subject.positions == "none":
        for tokens in (AT_ONCE, 4_096, 2_048, 1_024, 512, 256, 128):
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
    """Name the bug that the token at position p shows, and say what was seen. Positions up to `right` are right."""
    if not bool(z.abs().isfinite().all()):
        return "not-finite", f"At position {p:,} the result is not finite."
    at = torch.tensor(p)
    for rounding in ("positions", "angles", "frequencies"):
        for dtype in (torch.bfloat16, torch.float16):
            if largest_error(z, replace(law, rounding=rounding, dtype=dtype).at(at), law.factor) < 0.02:
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
    off = largest_error(z, law.at(at), law.factor)
    says = f"At position {p:,}, cos and sin are off by {off:.2g}. Float32 explains at most {float32_error(p):.1e}."
    return "wrong-far-positions", says
