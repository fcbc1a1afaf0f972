"""Judge the state of an object: a base shared with other objects, effects of earlier calls, tables lost on meta."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ropewalk.conformance import reach
from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.law import CLOSE, largest_error
from ropewalk.conformance.report import Grade, Report
from ropewalk.conformance.subject import CallError, Subject

FAR = 5_000
_OF_ROWS = {"positions-ignored", "first-row-positions", "rows-mixed-up", "batch-ignored"}


def judge(baseline: Baseline, report: Report, length: int | None, sure: Collection[str]) -> None:
    """Compare new, used and loaded objects. `sure` holds the codes that the first calls have shown."""
    if length is None:
        _judge_earlier_calls(baseline, report, sure)
        _judge_rows(baseline, report)
    _judge_base(baseline, report)
    _judge_meta(baseline, report)


def _angles_match(subject: Subject, baseline: Baseline, first: int = 0) -> bool:
    positions = torch.arange(first, first + 16)[None]
    z = reach.measure(subject, baseline.structure, baseline.channels, positions)[0]
    return largest_error(z, baseline.multipliers[first : first + 16], 1.0) < CLOSE


def _judge_base(baseline: Baseline, report: Report) -> None:
    arguments = baseline.subject.arguments
    if baseline.subject.rebuild is None or arguments is None or arguments.base is None:
        return
    try:
        other = baseline.subject.rebuild(arguments.base * 37)
        if _angles_match(other, baseline):
            report.add(
                "base-ignored", f"An object of base {arguments.base * 37:g} has the angles of base {arguments.base:g}."
            )
        report.grade(
            "another base",
            "as expected" if "base-ignored" not in report.codes else "has no effect",
            "base-ignored" not in report.codes,
        )
    except CallError as e:
        report.grade("another base", f"raises: {e}")


def _judge_earlier_calls(baseline: Baseline, report: Report, sure: Collection[str]) -> None:
    subject = baseline.subject
    far = torch.arange(FAR, FAR + 16)[None]
    try:
        if subject.accepts(far):
            reach.measure(subject, baseline.structure, baseline.channels, far)
        else:
            reach.measure(subject, baseline.structure, baseline.channels, torch.arange(600)[None])
    except CallError:
        pass  # the end of a table, which `reach` reports
    right = _angles_match(subject, baseline)
    offset = torch.arange(7, 23)[None]
    if right and subject.rebuild is not None and subject.accepts(offset):
        right = _angles_match(subject, baseline, 7) or not _angles_match(subject.rebuild(), baseline, 7)
    if not right:
        report.drop(*(code for code in report.codes if code not in sure))
        report.grades = [Grade(one.name, "not judged: the result depends on earlier calls") for one in report.grades]
        report.add("earlier-calls-matter", "The same call returns another result after a different call.")
    report.grade("earlier calls", "no effect, as expected" if right else "they change the result", right)


def _judge_rows(baseline: Baseline, report: Report) -> None:
    subject = baseline.subject if baseline.subject.rebuild is None else baseline.subject.rebuild()
    positions = torch.stack((torch.arange(16), torch.arange(FAR, FAR + 16)))
    if not subject.accepts(positions) or "earlier-calls-matter" in report.codes:
        return
    try:
        z = reach.measure(subject, baseline.structure, baseline.channels, positions)[0]
    except CallError:
        return
    if largest_error(z, baseline.multipliers[:16], 1.0) > CLOSE and not _OF_ROWS & {*report.codes}:
        report.add("rows-disturb-each-other", f"Positions 0 to 15 get other angles next to a row at {FAR:,}.")
        report.drop("wrong-far-positions")


def _judge_meta(baseline: Baseline, report: Report) -> None:
    """Load the module as models are loaded: create it on the meta device, allocate memory, load the checkpoint."""
    if baseline.subject.rebuild is None or baseline.subject.module is None:
        return
    try:
        with torch.device("meta"):
            subject = baseline.subject.rebuild()
        module = subject.module
        if module is None:
            return
        module.to_empty(device="cpu")
        saved = baseline.subject.module.state_dict()
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name not in saved and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)  # uninitialized memory may hold anything
        module.load_state_dict(saved, strict=False)
    except Exception as e:  # a constructor may raise anything on the meta device
        report.grade("meta device", f"cannot be created there: {type(e).__name__}")
        return
    try:
        right = _angles_match(subject, baseline)
    except CallError:
        right = False
    if not right:
        report.add("lost-on-meta", "Its angles are neither in the checkpoint nor recomputed.")
    report.grade("meta device", "as expected" if right else "the angles are lost", right or None)
