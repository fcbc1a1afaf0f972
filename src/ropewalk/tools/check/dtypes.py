"""Measure the loss of precision in 16 bits: of q and k in 16 bits, under autocast, and of a module cast to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.tools.check.baseline import Baseline
from ropewalk.tools.check.far_positions import name_bug
from ropewalk.tools.check.law import NAMES, float32_error
from ropewalk.tools.check.subject import CallError, Subject

# The error that rounding explains: cos and sin, the product and the sum lose half a unit each, of numbers up to √2.
ROUNDING = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
PROBES = (0, 252, 300, 1_020, 2_044, 4_092)


def judge(baseline: Baseline) -> None:
    """Pass q and k in bfloat16 and in float16, and check the dtype and the error of the results."""
    subject, report = baseline.subject, baseline.report
    for dtype, name in NAMES.items():
        positions = torch.arange(5)[None]
        q = baseline.tensor(1, 5, 6, 1).to(dtype)
        try:
            out, _ = subject(q, q.clone(), positions)
            worst, at = _largest_error(baseline, subject, dtype)
        except CallError as e:
            report.add(e.code, f"With {name} tensors: {e}.")
            report.grade(f"{name} tensors", f"{e}")
            continue
        if out.dtype != dtype:
            says = f"The input is {name}, and the output is {str(out.dtype).removeprefix('torch.')}."
            report.add("wider-output" if torch.finfo(out.dtype).bits > 16 else "wrong-output-dtype", says)
        right = worst <= 1
        if not right and report.verdict == "right":
            code, says = name_bug(baseline, *at)
            report.add(code, f"With {name} tensors: {says[0].lower()}{says[1:]}")
        exact = baseline.predict(q, positions)
        loss, rounding = (_relative_rms(t.to(torch.float64), exact) for t in (out, exact.to(dtype)))
        says = f"error {loss:.1e} of the size of x; rounding only the result costs {rounding:.1e}"
        report.grade(f"{name} tensors", says, right)
    if report.verdict == "right" and not subject.given_tables:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _judge_caution(baseline, subject, "lost-by-autocast", "under autocast")


def judge_cast(baseline: Baseline) -> None:
    """Cast the module as `model.bfloat16()` does, and check its angles."""
    if baseline.subject.rebuild is None or (subject := baseline.subject.rebuild()).module is None:
        return
    subject.module.to(torch.bfloat16)
    _judge_caution(baseline, subject, "lost-by-half", "after .bfloat16()")


def _judge_caution(baseline: Baseline, subject: Subject, code: str, when: str) -> None:
    """Report a caution if the angles have a larger error than rounding q and k to bfloat16 explains."""
    report, law = baseline.report, baseline.law
    try:
        worst, (z, positions, token) = _largest_error(baseline, subject, torch.bfloat16)
    except CallError as e:
        report.grade(when, f"{e}")
        return
    if worst > 1 and report.verdict == "right":
        p, far = int(positions[token]), float((z - law.at(positions))[token].abs().max()) / law.factor
        report.add(code, f"{when.capitalize()}, cos and sin at position {p:,} are off by {far:.2g}.")
    report.grade(when, "the angles are rounded" if worst > 1 else "as expected", worst <= 1 or None)


def _relative_rms(a: Tensor, b: Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt())


def _largest_error(
    baseline: Baseline, subject: Subject, dtype: torch.dtype
) -> tuple[float, tuple[Tensor, Tensor, int]]:
    """Find the largest error, as a multiple of the error that rounding explains.

    Returns:
        That multiple, and where it occurs: the measured multipliers `[tokens, pairs]`, their positions, and the index
        of the token.
    """
    law = baseline.law
    worst, at = 0.0, (baseline.multipliers[:1], torch.arange(1), 0)
    for positions in _probes(baseline):
        z = baseline.measure(positions, dtype, subject)
        limits = ROUNDING[dtype] + float32_error(positions)
        parts = ((z - law.at(positions)).abs().amax(-1) / law.factor / limits).nan_to_num(nan=torch.inf)
        if float(parts.max()) > worst:
            worst, at = float(parts.max()), (z, positions, int(parts.argmax()))
    return worst, at


def _probes(baseline: Baseline) -> list[Tensor]:
    subject = baseline.subject
    if subject.given_tables or subject.positions == "none":
        return [torch.arange(64 if subject.given_tables else 512)]
    table_length = subject.arguments.length if subject.arguments is not None else None
    last = min(n for n in (baseline.expected.length, table_length, 10**9) if n)
    return [torch.arange(p, p + 4) for p in PROBES if p + 4 <= last]
