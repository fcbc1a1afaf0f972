"""Test that a call writes all of its results, and that the same call gives the same bits."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import Tensor

from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.find.ways import ONE_TOKEN
from ropewalk.tools.check.measure.case import CLOSE, KNOWN, Case, unwritten, usual, where
from ropewalk.tools.check.report import Report

_TIMES = 5


def judge_written(subject: Subject, report: Report) -> bool:
    """Report elements that are never written. Return whether there are any.

    From here on, memory that the target allocates holds NaN, and no longer the results of earlier calls.
    """
    case = usual(subject)
    for name, missing in zip("qk", unwritten(partial(_call, subject, case)), strict=False):
        if bool(missing.any()):
            smallest = case.smallest(lambda c: any(bool(out.isnan().any()) for out in _call(subject, c)))
            says = f"If new memory holds NaN, {name} is NaN{where(missing)}. No more was judged."
            report.add("output-not-written", says, str(smallest))
            return True
    return False


def judge(subject: Subject, report: Report) -> bool:
    """Report results that vary from call to call. Return whether there are any.

    The first case has sizes that no earlier call had, at which a function may tune itself.
    """
    cases = (usual(subject, heads=11), usual(subject), usual(subject, tokens=KNOWN, heads=32))
    for case in cases[: 1 if subject.layout in ONE_TOKEN else None]:
        with contextlib.suppress(CallError):
            if subject.accepts(torch.arange(case.tokens)[None]) and (worst := _varies_by(subject, case)):
                _report(subject, case, worst, report)
                return True
    report.grade("the same call again", "the same bits, as expected", True)
    return False


def _call(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of a call at positions from 0 on, like those of every other step until the conditions."""
    positions = torch.arange(case.tokens).expand(case.rows, -1)
    return [out for out in subject(*case.tensors(), positions) if out is not None]


def _sequence(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of the same call several times."""
    return [torch.cat([out.flatten() for out in _call(subject, case)]) for _ in range(_TIMES)]


def _varies_by(subject: Subject, case: Case) -> float:
    """Return by how much the results of the same call vary, or 0.

    The first call of an object may fill its caches. That of a function may only round otherwise.
    """
    first, second, *others = _sequence(subject, case)
    worst = max(_distance(second, other) for other in others)
    new = _distance(first, second) if subject.rebuild is None else 0.0
    return max(worst, new if new > CLOSE else 0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.nan_to_num() - b.nan_to_num()).abs().max())


def _report(subject: Subject, case: Case, worst: float, report: Report) -> None:
    """Name the reason: new objects that go through the same results have state, and others have a race."""
    smallest = str(case.smallest(lambda c: _varies_by(subject, c) > 0))
    if subject.rebuild is not None:
        runs = zip(*(_sequence(subject.rebuild(), case) for _ in range(2)), strict=True)
        if not any(_distance(a, b) for a, b in runs):
            says = "The same call returns another result each time, and the same ones for a new object."
            report.add("earlier-calls-matter", f"{says} No more was judged.", smallest)
            return
    says = f"Of {_TIMES} equal calls, results differ by up to {worst:.2g}. No more was judged."
    report.add("not-repeatable", says, smallest)
