"""Whether far tokens have their own angles, up to position 1,048,575, and what they have instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk.conformance.law import Law, worst
from ropewalk.conformance.report import Report
from ropewalk.conformance.structure import Structure
from ropewalk.conformance.subject import Refused, Subject

SHOWN = (127, 4_095, 32_767, 131_071, 1_048_575)
FARTHEST = 1_048_575
AT_ONCE = 8_192  # tokens of one call, where positions cannot be passed


def usual(position: int) -> float:
    """The error of cos and sin that float32 explains: a rounded frequency and a rounded product, with room.

    Measured at 1,048,575: 0.03 to 0.09 where frequencies are powers, 0.16 where each is the product of the one before.
    """
    return 2e-5 + 4 * position * 2.0**-24


def numbers(
    subject: Subject, structure: Structure, channels: int, positions: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What each pair is multiplied by at these positions `[batch, seq]`: complex128 `[batch, seq, pairs]`."""
    x = structure.firsts(channels).to(dtype).expand(*positions.shape, 2, channels).contiguous()
    out, _ = subject(x, x.clone(), positions)
    return structure.numbers(out)[:, :, 0]


def judge(subject: Subject, structure: Structure, channels: int, law: Law, report: Report, length: int | None) -> None:
    """Compare far tokens with the law, and name what they have instead."""
    errors: dict[int, float] = {}
    ends: str | None = None
    for positions in _asked(subject, length):
        try:
            z = numbers(subject, structure, channels, positions[None])[0]
        except Refused as e:
            ends = ends or f"raises at position {int(positions[-1])}: {e}"
            continue
        far = (z - law.at(positions)).abs().amax(-1) / law.factor
        limits = torch.tensor([usual(int(p)) for p in positions], dtype=torch.float64)
        wrong = ~(far <= limits)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0, 0])
            at = first + int(
                first + 1 < len(wrong) and bool(wrong[first + 1])
            )  # 0, where a table begins again, is no sign
            code, says = instead(z[at], int(positions[at]), law, subject, right=int(positions[first]) - 1)
            if int(wrong.sum()) == 1 and not bool(wrong[-1]):
                code, says = "wrong-far-positions", f"{says} The next one is right."
            report.add(code, says)
            report.grade("far positions", f"wrong from {int(positions[first]):,} on, as far as was tried", False)
            return
        errors |= {int(p): float(e) for p, e in zip(positions, far, strict=True)}
    for p in SHOWN:
        if p in errors:
            exact = 2.0**-24 * max(1.0, 2 * law.factor)
            like = "exact to float32" if errors[p] < 4 * exact else f"float32 angles lose up to {usual(p):.1e}"
            report.grade(f"error at {p:,}", f"{errors[p]:.1e} of cos and sin; {like}", True, errors[p])
    if ends:
        report.grade("end of the table", ends)


def longer(subject: Subject, structure: Structure, channels: int, law: Law, report: Report, rope: Rope, n: int) -> None:
    """A sequence of n tokens, for which a scheme that depends on the length has these other frequencies."""
    positions = torch.arange(n - 4, n)
    if not subject.takes(positions[None]):
        return
    try:
        z = numbers(subject, structure, channels, positions[None])[0]
    except Refused as e:
        report.grade(f"{n:,} tokens", f"raises: {e}")
        return
    sizes, wanted = z.abs(), rope.attention_factor
    directions, short = z / sizes, replace(law, factor=1.0)
    moving = torch.from_numpy(rope.inv_freq[rope.inv_freq != 0].copy())
    right = replace(short, inv_freq=moving).error(directions, positions) < usual(n)
    if not right:
        says = (
            "They are those of a short one." if short.error(directions, positions) < usual(n) else "They are neither."
        )
        report.add("length-ignored", f"Frequencies of a sequence of {n:,} tokens should be others. {says}")
        report.grade(f"{n:,} tokens", "not scaled for that length", False)
        return
    right = bool(((sizes / wanted - 1).abs() < 2e-3).all())
    if not right:
        found = f"{float(sizes.median()):.5g}, and should be by {wanted:.5g}"
        report.add("attention-factor", f"In a sequence of {n:,} tokens cos and sin are multiplied by {found}.")
    report.grade(f"{n:,} tokens", "as it should be" if right else "multiplied by another attention factor", right)


def _asked(subject: Subject, length: int | None) -> Iterator[Tensor]:
    last = FARTHEST if length is None else length - 1
    if subject.positions == "none":
        for tokens in (AT_ONCE, 4_096, 2_048, 1_024, 512, 256, 128):
            try:
                x = torch.zeros(1, tokens, 1, subject.channels)
                subject(x, x, torch.arange(tokens)[None])
            except Refused:
                continue
            yield torch.arange(min(tokens, last + 1))
            return
        return
    made = subject.made.length if subject.made is not None else None
    ends = sorted({*(2**n for n in range(6, 21)), 300, 5_000, *((made, made + 3) if made else ())})
    for end in ends:
        if end - 1 <= last:
            yield torch.arange(end - 4, end)
            if end + 4 <= last + 1 and end <= 8_192:
                yield torch.arange(end, end + 4)


def instead(z: Tensor, p: int, law: Law, subject: Subject, *, right: int = 0) -> tuple[str, str]:
    """The bug that the token at p shows, if those up to `right` have no table that ends."""
    if not bool(z.abs().isfinite().all()):
        return "not-finite", f"At position {p:,} the result is not finite."
    at = torch.tensor(p)
    for rounding in ("positions", "angles", "frequencies"):
        for dtype in (torch.bfloat16, torch.float16):
            if worst(z, replace(law, rounding=rounding, dtype=dtype).at(at), law.factor) < 0.02:
                short = str(dtype).removeprefix("torch.")
                return f"low-precision-{rounding}", f"Position {p:,} shows them rounded to {short}."
    if float(z.abs().max()) < 1e-6:
        return "zeros-past-table", f"At position {p:,} the rotated channels are zero."
    if worst(z, torch.ones_like(z), 1.0) < 1e-3:
        return "unrotated-past-table", f"The token at position {p:,} is not rotated."
    lengths = sorted(
        {
            p,
            *range(p - 3, p),
            *(2**n for n in range(5, 21)),
            *((subject.made.length,) if subject.made and subject.made.length else ()),
        }
    )
    for n in lengths:
        if right < n <= p:
            if worst(z, law.at(torch.tensor(n - 1)), law.factor) < usual(n):
                return "table-clamps", f"Position {p:,} has the angles of {n - 1:,}, the last of a table of {n:,} rows."
            if p % n < p and worst(z, law.at(torch.tensor(p % n)), law.factor) < usual(n):
                code = "table-wraps" if subject.positions in ("rows", "shared") else "positions-restart"
                return code, f"Position {p:,} has the angles of {p % n:,}: they begin again after {n:,} tokens."
    off = worst(z, law.at(at), law.factor)
    says = f"At position {p:,} cos and sin are off by {off:.2g}; up to {usual(p):.1e} is usual for float32."
    return "wrong-far-positions", says
