"""What an object keeps: a base that others see, earlier calls, tables that the meta device loses."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ropewalk.conformance import reach
from ropewalk.conformance.conditions import Known
from ropewalk.conformance.law import CLOSE, worst
from ropewalk.conformance.report import Grade, Report
from ropewalk.conformance.subject import Refused, Subject

FAR = 5_000
_OF_ROWS = {"positions-ignored", "first-row-positions", "rows-mixed-up", "batch-ignored"}


def judge(known: Known, report: Report, length: int | None, sure: Collection[str]) -> None:
    """Compare fresh objects, used ones and those that were loaded. `sure` are the codes that first calls have shown."""
    if length is None:
        _earlier_calls(known, report, sure)
        _rows(known, report)
    _base(known, report)
    _meta(known, report)


def _same(subject: Subject, known: Known, first: int = 0) -> bool:
    positions = torch.arange(first, first + 16)[None]
    z = reach.numbers(subject, known.structure, known.channels, positions)[0]
    return worst(z, known.numbers[first : first + 16], 1.0) < CLOSE


def _base(known: Known, report: Report) -> None:
    made = known.subject.made
    if known.subject.fresh is None or made is None or made.base is None:
        return
    try:
        other = known.subject.fresh(made.base * 37)
        if _same(other, known):
            report.add("base-ignored", f"An object of base {made.base * 37:g} has the angles of {made.base:g}.")
        report.grade(
            "base of its own",
            "as it should be" if "base-ignored" not in report.codes else "",
            "base-ignored" not in report.codes,
        )
    except Refused as e:
        report.grade("base of its own", f"raises: {e}")


def _earlier_calls(known: Known, report: Report, sure: Collection[str]) -> None:
    subject = known.subject
    far = torch.arange(FAR, FAR + 16)[None]
    try:
        if subject.takes(far):
            reach.numbers(subject, known.structure, known.channels, far)
        else:
            reach.numbers(subject, known.structure, known.channels, torch.arange(600)[None])
    except Refused:
        pass  # the end of a table, which `reach` says
    right = _same(subject, known)
    offset = torch.arange(7, 23)[None]
    if right and subject.fresh is not None and subject.takes(offset):
        right = _same(subject, known, 7) or not _same(subject.fresh(), known, 7)
    if not right:
        report.drop(*(code for code in report.codes if code not in sure))
        report.grades = [Grade(one.name, "not judged: the result depends on earlier calls") for one in report.grades]
        report.add("earlier-calls-matter", "The same tokens come out otherwise after another call.")
    report.grade("earlier calls", "as it should be" if right else "they change the result", right)


def _rows(known: Known, report: Report) -> None:
    subject = known.subject if known.subject.fresh is None else known.subject.fresh()
    positions = torch.stack((torch.arange(16), torch.arange(FAR, FAR + 16)))
    if not subject.takes(positions) or "earlier-calls-matter" in report.codes:
        return
    try:
        z = reach.numbers(subject, known.structure, known.channels, positions)[0]
    except Refused:
        return
    if worst(z, known.numbers[:16], 1.0) > CLOSE and not _OF_ROWS & {*report.codes}:
        report.add("rows-disturb-each-other", f"Positions 0 to 15 come out otherwise beside a row at {FAR:,}.")
        report.drop("wrong-far-positions")


def _meta(known: Known, report: Report) -> None:
    """As models are loaded: made on the meta device, given memory, then the checkpoint."""
    if known.subject.fresh is None or known.subject.module is None:
        return
    try:
        with torch.device("meta"):
            subject = known.subject.fresh()
        module = subject.module
        if module is None:
            return
        module.to_empty(device="cpu")
        saved = known.subject.module.state_dict()
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name not in saved and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)  # what was in memory
        module.load_state_dict(saved, strict=False)
    except Exception as e:  # whatever their class raises there
        report.grade("meta device", f"cannot be made there: {type(e).__name__}")
        return
    try:
        right = _same(subject, known)
    except Refused:
        right = False
    if not right:
        report.add("lost-on-meta", "What it needs is neither in the checkpoint nor made again.")
    report.grade("meta device", "as it should be" if right else "its angles are lost", right or None)
