"""Test that a call writes all of its results, and that the same call gives the same bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ropewalk.tools.check.find.subject import Subject
from ropewalk.tools.check.find.ways import ONE_TOKEN
from ropewalk.tools.check.measure.case import KNOWN, Case, first_fault, unwritten, usual, where
from ropewalk.tools.check.report import Report

_TIMES = 5


def judge(subject: Subject, report: Report) -> bool:
    """Report elements that are never written, and results that vary from call to call. Return whether there are any.

    The first case has sizes that no earlier call had, at which a function may tune itself. From here on, memory that
    the target allocates holds NaN, and no longer the results of earlier calls.
    """
    cases = [usual(subject, heads=11), usual(subject), usual(subject, tokens=KNOWN, heads=32)]
    cases = [each for each in cases if subject.accepts(torch.arange(each.tokens)[None])]
    cases = cases[:1] if subject.layout in ONE_TOKEN else cases
    for fault, of in ((_missing, [usual(subject), *cases[2:]]), (_varying, cases)):  # and in the largest case
        found, _ = first_fault(of, partial(fault, subject))
        if found is not None:
            code, says, case = found
            report.add(code, f"{says} No more was judged.", str(case))
            return True
    q, k = usual(subject).tensors()
    out = _call(subject, usual(subject))[0]
    kept = out.clone()
    subject(-q, -k, torch.arange(q.shape[1])[None])
    if _distance(out, kept):
        report.add("result-overwritten", "It changes when the same is called with −x. No more was judged.")
        return True
    report.grade("the same call again", "the same bits, as expected", True)
    return False


def _call(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of a call at positions from 0 on, like those of every other step until the conditions."""
    positions = torch.arange(case.tokens).expand(case.rows, -1)
    return [out for out in subject(*case.tensors(), positions) if out is not None]


def _missing(subject: Subject, case: Case) -> tuple[str, str] | None:
    for name, missing in zip("qk", unwritten(partial(_call, subject, case)), strict=False):
        if bool(missing.any()):
            return "output-not-written", f"If new memory holds NaN, {name} is NaN{where(missing)}."
    return None


def _varying(subject: Subject, case: Case) -> tuple[str, str] | None:
    """Name the reason: new objects that go through the same results have state, and others have a race.

    The first call of an object may fill its caches. That of a function may only round otherwise.
    """
    first, second, *others = _sequence(subject, case)
    worst = max(_distance(second, other) for other in others)
    if subject.rebuild is None and (new := _distance(first, second)) > subject.close:
        worst = max(worst, new)
    if not worst:
        return None
    if subject.rebuild is not None:
        runs = zip(*(_sequence(subject.rebuild(), case) for _ in range(2)), strict=True)
        if not any(_distance(a, b) for a, b in runs):
            says = "The same call returns another result each time, and the same ones for a new object."
            return "earlier-calls-matter", says
    return "not-repeatable", f"Of {_TIMES} equal calls, results differ by up to {worst:.2g}."


def _sequence(subject: Subject, case: Case) -> list[Tensor]:
    """Return the results of the same call several times."""
    return [torch.cat([out.flatten() for out in _call(subject, case)]) for _ in range(_TIMES)]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.nan_to_num() - b.nan_to_num()).abs().max())
