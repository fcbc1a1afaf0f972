"""Measure the loss of precision in 16 bits: of q and k in bfloat16 or float16, and of a module cast to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.far_positions import float32_error, measure, name_bug
from ropewalk.conformance.law import Law
from ropewalk.conformance.report import Report
from ropewalk.conformance.subject import CallError, Subject

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The error that rounding explains: cos and sin, the product and the sum lose half a unit each, of numbers up to √2.
ROUNDING = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
PROBES = (0, 252, 300, 1_020, 2_044, 4_092)


def judge(baseline: Baseline, law: Law, report: Report, length: int | None) -> None:
    """Pass q and k in bfloat16 and in float16, and check the dtype and the error of the results."""
    for dtype, name in NAMES.items():
        try:
            out = _rotate_once(baseline, dtype)
            if out[0].dtype != dtype:
                report.add(
                    "wrong-output-dtype",
                    f"The input is {name}, and the output is {str(out[0].dtype).removeprefix('torch.')}.",
                )
            worst, at = _largest_error(baseline.subject, baseline, law, dtype, length)
        except CallError as e:
            report.add("raises", f"With {name} tensors: {e}.")
            report.grade(f"{name} tensors", f"raises: {e}")
            continue
        loss = _relative_rms(*out[1:])
        rounding = _relative_rms(out[2].to(dtype).to(torch.float64), out[2])
        right = worst <= 1
        if not right and report.verdict == "right":
            code, says = name_bug(at[0], at[1], law, baseline.subject)
            report.add(code, f"With {name} tensors: {says[0].lower()}{says[1:]}")
        report.grade(
            f"{name} tensors",
            f"error {loss:.1e} of the size of x; rounding only the result costs {rounding:.1e}",
            right,
        )


def _rotate_once(baseline: Baseline, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(5)[None]
    q = baseline.tensor(1, 5, 6, 1).to(dtype)
    out, _ = baseline.subject(q, q.clone(), positions)
    return out, out.to(torch.float64), baseline.predict(q, positions)


def _relative_rms(a: Tensor, b: Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt())


def _largest_error(
    subject: Subject, baseline: Baseline, law: Law, dtype: torch.dtype, length: int | None
) -> tuple[float, tuple[Tensor, int]]:
    """Find the largest error, as a multiple of the error that rounding explains.

    Returns:
        That multiple, and a tuple of the measured multipliers `[pairs]` and the position where it occurs.
    """
    worst, at = 0.0, (baseline.multipliers[0], 0)
    for positions in _probes(subject, length):
        z = measure(subject, baseline.structure, baseline.channels, positions[None], dtype)[0]
        limits = torch.tensor([ROUNDING[dtype] + float32_error(int(p)) for p in positions], dtype=torch.float64)
        parts = ((z - law.at(positions)).abs().amax(-1) / law.factor / limits).nan_to_num(nan=torch.inf)
        if float(parts.max()) > worst:
            token = int(parts.argmax())
            worst, at = float(parts.max()), (z[token], int(positions[token]))
    return worst, at


def _probes(subject: Subject, length: int | None) -> list[Tensor]:
    if subject.given_tables or subject.positions == "none":
        return [torch.arange(64 if subject.given_tables else 512)]
    table_length = subject.arguments.length if subject.arguments is not None else None
    last = min(n for n in (length, table_length, 10**9) if n is not None)
    return [torch.arange(p, p + 4) for p in PROBES if p + 4 <= last]


def judge_cast(baseline: Baseline, law: Law, report: Report, length: int | None) -> None:
    """Cast the module as `model.bfloat16()` does, and check its angles."""
    if baseline.subject.rebuild is None or baseline.subject.module is None:
        return
    subject = baseline.subject.rebuild()
    if subject.module is None:
        return
    subject.module.to(torch.bfloat16)
    try:
        worst, at = _largest_error(subject, baseline, law, torch.bfloat16, length)
    except CallError as e:
        report.grade("after .bfloat16()", f"raises: {e}")
        return
    if worst > 1 and report.verdict == "right":
        far = float((at[0] - law.at(torch.tensor(at[1]))).abs().max()) / law.factor
        report.add("lost-by-half", f"After .bfloat16(), cos and sin at position {at[1]:,} are off by {far:.2g}.")
    report.grade("after .bfloat16()", "the angles are rounded" if worst > 1 else "as expected", worst <= 1 or None)
