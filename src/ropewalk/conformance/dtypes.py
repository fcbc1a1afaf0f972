"""What 16 bits lose: q and k in bfloat16 and float16, and the whole module cast."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.conformance import reach
from ropewalk.conformance.conditions import Known
from ropewalk.conformance.law import Law
from ropewalk.conformance.report import Report
from ropewalk.conformance.subject import Refused, Subject

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# cos and sin rounded, the product rounded, the sum rounded, of numbers up to √2: half a unit each.
ROUNDED = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
PROBES = (0, 252, 300, 1_020, 2_044, 4_092)


def judge(known: Known, law: Law, report: Report, length: int | None) -> None:
    """q and k in 16 bits: dtype and error of what comes back."""
    for dtype, name in NAMES.items():
        try:
            out = _plain(known, dtype)
            if out[0].dtype != dtype:
                report.add(
                    "wrong-output-dtype", f"{name} goes in, {str(out[0].dtype).removeprefix('torch.')} comes back."
                )
            worst, at = _worst(known.subject, known, law, dtype, length)
        except Refused as e:
            report.add("raises", f"Tried: {name} in. {e}.")
            report.grade(f"{name} in", f"raises: {e}")
            continue
        loss = _rms(*out[1:])
        rounding = _rms(out[2].to(dtype).to(torch.float64), out[2])
        right = worst <= 1
        if not right and report.verdict == "right":
            code, says = reach.instead(at[0], at[1], law, known.subject)
            report.add(code, f"With {name} tensors: {says[0].lower()}{says[1:]}")
        report.grade(
            f"{name} in", f"error {loss:.1e} of the size of x; rounding the result alone costs {rounding:.1e}", right
        )


def _plain(known: Known, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(5)[None]
    q = known.tensor(1, 5, 6, 1).to(dtype)
    out, _ = known.subject(q, q.clone(), positions)
    return out, out.to(torch.float64), known.predicted(q, positions)


def _rms(a: Tensor, b: Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt())


def _worst(
    subject: Subject, known: Known, law: Law, dtype: torch.dtype, length: int | None
) -> tuple[float, tuple[Tensor, int]]:
    """The largest error as a part of what rounding explains, and the numbers and position where it is."""
    found, at = 0.0, (known.numbers[0], 0)
    for positions in _asked(subject, length):
        z = reach.numbers(subject, known.structure, known.channels, positions[None], dtype)[0]
        limits = torch.tensor([ROUNDED[dtype] + reach.usual(int(p)) for p in positions], dtype=torch.float64)
        parts = ((z - law.at(positions)).abs().amax(-1) / law.factor / limits).nan_to_num(nan=torch.inf)
        if float(parts.max()) > found:
            token = int(parts.argmax())
            found, at = float(parts.max()), (z[token], int(positions[token]))
    return found, at


def _asked(subject: Subject, length: int | None) -> list[Tensor]:
    if subject.ours or subject.positions == "none":
        return [torch.arange(64 if subject.ours else 512)]
    made = subject.made.length if subject.made is not None else None
    last = min(n for n in (length, made, 10**9) if n is not None)
    return [torch.arange(p, p + 4) for p in PROBES if p + 4 <= last]


def cast(known: Known, law: Law, report: Report, length: int | None) -> None:
    """The module in bfloat16, as `model.bfloat16()` makes it."""
    if known.subject.fresh is None or known.subject.module is None:
        return
    subject = known.subject.fresh()
    if subject.module is None:
        return
    subject.module.to(torch.bfloat16)
    try:
        worst, at = _worst(subject, known, law, torch.bfloat16, length)
    except Refused as e:
        report.grade("after .bfloat16()", f"raises: {e}")
        return
    if worst > 1 and report.verdict == "right":
        far = float((at[0] - law.at(torch.tensor(at[1]))).abs().max()) / law.factor
        report.add("lost-by-half", f"After .bfloat16(), cos and sin at position {at[1]:,} are off by {far:.2g}.")
    report.grade("after .bfloat16()", "its angles are rounded" if worst > 1 else "as it should be", worst <= 1 or None)
