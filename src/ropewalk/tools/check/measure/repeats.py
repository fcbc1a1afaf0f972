"""Test that a call writes all of its results, and that the same call gives the same bits."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import Tensor

from ropewalk.tools.check.find.subject import CallError, Subject
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
    """Report results that vary from call to call. Return whether there are any."""
    case = usual(subject)
    if subject.rebuild is None and _report_first(subject, report):
        return True
    for each in (case, usual(subject, tokens=KNOWN, heads=32)):
        with contextlib.suppress(CallError):
            if subject.accepts(torch.arange(each.tokens)[None]) and _varies(subject, each):
                return _report_varying(subject, each, report)
    report.grade("the same call again", "the same bits, as expected", True)
    return False


def _report_first(subject: Subject, report: Report) -> bool:
    """Report a function whose first call of a size, when it tunes itself, has another result than later ones."""
    new = usual(subject, heads=11)  # no earlier call had these sizes
    with contextlib.suppress(CallError):
        first, *later = _sequence(subject, new)
        worst = _distance(first, later[0])
        if worst > CLOSE and not any(_differ(later[0], other) for other in later):
            says = f"The first of {_TIMES} equal calls differs by up to {worst:.2g} from the others."
            report.add("not-repeatable", f"{says} No more was judged.", str(new))
            return True
    return False


def _call(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of a call at positions from 0 on, like those of every other step until the conditions."""
    positions = torch.arange(case.tokens).expand(case.rows, -1)
    return [out for out in subject(*case.tensors(), positions) if out is not None]


def _sequence(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of the same call several times."""
    return [torch.cat([out.flatten() for out in _call(subject, case)]) for _ in range(_TIMES)]


def _varies(subject: Subject, case: Case) -> bool:
    """Return whether the result still varies after the second call, when everything is cached that can be."""
    _, first, *others = _sequence(subject, case)
    return any(_differ(first, other) for other in others)


def _differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.nan_to_num(), b.nan_to_num())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _report_varying(subject: Subject, case: Case, report: Report) -> bool:
    """Name the reason: new objects that go through the same results have state, and others have a race."""
    smallest = case.smallest(lambda c: _varies(subject, c))
    if subject.rebuild is not None:
        runs = zip(*(_sequence(subject.rebuild(), case) for _ in range(2)), strict=True)
        if not any(_differ(a, b) for a, b in runs):
            says = "The same call returns another result each time, and the same ones for a new object."
            report.add("earlier-calls-matter", f"{says} No more was judged.", str(smallest))
            return True
    first, *others = _sequence(subject, case)
    worst = max(_distance(first, other) for other in others)
    says = f"Of {_TIMES} equal calls, results differ by up to {worst:.2g}. No more was judged."
    report.add("not-repeatable", says, str(smallest))
    return True
