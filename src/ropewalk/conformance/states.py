"""Find state that makes results wrong.

Such state is a base that objects share, an effect of earlier calls, or angles that are lost on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ropewalk.conformance.conditions import Baseline
from ropewalk.conformance.far_positions import measure
from ropewalk.conformance.law import CLOSE, largest_error
from ropewalk.conformance.report import Grade, Report
from ropewalk.conformance.subject import CallError, Subject

FAR = 5_000
_ROW_BUGS = {"positions-ignored", "first-row-positions", "rows-mixed-up", "batch-ignored"}


def judge(baseline: Baseline, report: Report, length: int | None, sure: Collection[str]) -> None:
    """Compare the angles of new, used and loaded objects.

    Args:
        baseline: the first measurement.
        report: receives the findings.
        length: the number of tokens up to which the expected rope holds, or None if its scheme does not depend on it.
        sure: the codes of findings from the first calls, which no earlier call can have caused.
    """
    if length is None:
        _judge_earlier_calls(baseline, report, sure)
        _judge_rows(baseline, report)
    _judge_base(baseline, report)
    _judge_meta(baseline, report)


def _angles_match(subject: Subject, baseline: Baseline, first: int = 0) -> bool:
    """Return whether 16 tokens from position `first` on have the angles of the baseline."""
    positions = torch.arange(first, first + 16)[None]
    z = measure(subject, baseline.structure, baseline.channels, positions)[0]
    return largest_error(z, baseline.multipliers[first : first + 16], 1.0) < CLOSE


def _judge_base(baseline: Baseline, report: Report) -> None:
    arguments = baseline.subject.arguments
    if baseline.subject.rebuild is None or arguments is None or arguments.base is None:
        return
    try:
        rebuilt = baseline.subject.rebuild(arguments.base * 37)
        if _angles_match(rebuilt, baseline):
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
            measure(subject, baseline.structure, baseline.channels, far)
        else:
            measure(subject, baseline.structure, baseline.channels, torch.arange(600)[None])
    except CallError:
        pass  # the end of a table, which `far_positions` reports
    right = _angles_match(subject, baseline)
    offset = torch.arange(7, 23)[None]
    if right and subject.rebuild is not None and subject.accepts(offset):
        right = _angles_match(subject, baseline, 7) or not _angles_match(subject.rebuild(), baseline, 7)
    if not right:
        report.drop(*(code for code in report.codes if code not in sure))
        report.grades = [
            Grade(grade.name, "not judged: the result depends on earlier calls") for grade in report.grades
        ]
        report.add("earlier-calls-matter", "The same call returns another result after a different call.")
    report.grade("earlier calls", "no effect, as expected" if right else "they change the result", right)


def _judge_rows(baseline: Baseline, report: Report) -> None:
    subject = baseline.subject if baseline.subject.rebuild is None else baseline.subject.rebuild()
    positions = torch.stack((torch.arange(16), torch.arange(FAR, FAR + 16)))
    if not subject.accepts(positions) or "earlier-calls-matter" in report.codes:
        return
    try:
        z = measure(subject, baseline.structure, baseline.channels, positions)[0]
    except CallError:
        return
    if largest_error(z, baseline.multipliers[:16], 1.0) > CLOSE and not _ROW_BUGS & {*report.codes}:
        report.add(
            "rows-disturb-each-other", f"Positions 0 to 15 get other angles if another row of the batch is at {FAR:,}."
        )
        report.drop("wrong-far-positions")


def _judge_meta(baseline: Baseline, report: Report) -> None:
    """Load the module as large models are loaded: create it on the meta device, allocate memory, load the weights."""
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
        report.add("lost-on-meta", "The angles are neither stored in the checkpoint nor computed again.")
    report.grade("meta device", "as expected" if right else "the angles are lost", right or None)
