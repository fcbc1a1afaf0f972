"""Find state that makes results wrong: a base that objects share, or an effect of earlier calls."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure.baseline import Baseline, measure
from ropewalk.tools.check.measure.case import usual
from ropewalk.tools.check.measure.law import moving
from ropewalk.tools.check.measure.positions import BEYOND, LONGEST_CALL, is_beyond_length
from ropewalk.tools.check.report import Grade

FAR = 5_000
_ROW_BUGS = {"positions-ignored", "first-row-positions", "rows-mixed-up", "batch-ignored"}
_ROW_BUGS |= {"length-ignored", "lengths-exchanged"}


def judge(baseline: Baseline, sure: Collection[str]) -> None:
    """Compare the angles of new and used objects. No earlier call can have caused the findings that are `sure`."""
    far = max(FAR, 2 * (baseline.subject.expected.length or 0))  # beyond the length up to which the expected rope holds
    baseline.report.test("earlier calls", partial(_judge_earlier_calls, baseline, far, sure))
    baseline.report.test("other rows", partial(_judge_rows, baseline, far), may_raise=True)
    baseline.report.test("another base", partial(_judge_base, baseline), may_raise=True)


def _angles_match(baseline: Baseline, subject: Subject, first: int = 0, tokens: int = 16) -> bool:
    """Return whether tokens from position `first` on have the angles of the baseline."""
    positions = torch.arange(first, first + tokens)
    z = baseline.measure(positions, subject=subject)
    return baseline.law.agree(z, baseline.multipliers[positions], positions)


def takes_64_tokens(subject: Subject) -> bool:
    """Return whether 64 tokens can be passed, which a used object may refuse if its table never grows."""
    try:
        subject(*usual(subject, tokens=64).tensors(), torch.arange(64)[None])
    except CallError:
        return False
    return True


def _judge_base(baseline: Baseline) -> bool:
    arguments = baseline.subject.arguments
    if baseline.subject.rebuild is None or baseline.subject.way.given or not (arguments and arguments.base):
        return False
    speeds = baseline.law.inv_freq[1:].abs()  # that of the first pair is the same with any base, and so are 0 and 1
    if not bool(((speeds > 1e-5) & ((speeds - 1).abs() > 1e-5)).any()):
        return False
    if _angles_match(baseline, baseline.subject.rebuild(base=arguments.base * 37)):
        says = f"An object of base {arguments.base * 37:g} has the angles of base {arguments.base:g}."
        baseline.report.add("base-ignored", says)
    return True


def _judge_earlier_calls(baseline: Baseline, far: int, sure: Collection[str]) -> bool | str:
    subject, report, length = baseline.subject, baseline.report, baseline.subject.expected.length or 0
    if "output-not-written" in report.codes:
        return "not judged: what is never written may be the results of earlier calls"
    positions = torch.arange(far, far + 16)
    if not subject.accepts(positions[None]):
        positions = torch.arange(min(far, LONGEST_CALL) if length else 600)
    if len(positions) > 16 and length > len(positions):
        return f"not judged: no call with more than {length:,} tokens can be made"
    with contextlib.suppress(CallError):  # the end of a table, which `far_positions` reports
        baseline.measure(positions)
    says = "The same call returns another result after a different call."
    right, offset = _angles_match(baseline, subject), torch.arange(7, 23)[None]
    if right and subject.rebuild is not None and subject.accepts(offset):
        right = _angles_match(baseline, subject, 7) or not _angles_match(baseline, subject.rebuild(), 7)
    if right and not _angles_match_after_16_bits(baseline):
        right, says = False, "After a call with bfloat16 tensors, the angles for float32 tensors are rounded."
    if not right:
        report.drop(*(code for code in report.codes if code not in sure))
        report.grades = [Grade(g.name, "not judged: the result depends on earlier calls") for g in report.grades]
        report.add("earlier-calls-matter", says)
    return True


def _angles_match_after_16_bits(baseline: Baseline) -> bool:
    """Return whether float32 tensors get the angles of the baseline after the first call was in bfloat16."""
    subject = baseline.new_subject()
    if not _angles_match(baseline, baseline.new_subject(), tokens=21):  # then it is not the state
        return True
    try:  # 19 tokens, for which no earlier call has cached anything
        baseline.measure(torch.arange(19), torch.bfloat16, subject)
    except CallError:
        return True
    return _angles_match(baseline, subject, tokens=19)


def _judge_rows(baseline: Baseline, far: int) -> bool | str:
    """Check that a row of the batch at far positions does not change another row, unless the scheme says so."""
    report, subject, unresolved = baseline.report, baseline.new_subject(), baseline.subject.expected.unresolved
    if unresolved is not None and baseline.law.code is not None:
        return f"not judged: {baseline.law.code}"
    positions = torch.stack((torch.arange(16), torch.arange(far, far + 16)))
    if not subject.accepts(positions) or {"earlier-calls-matter", *_ROW_BUGS} & {*report.codes}:
        return False
    z: Tensor = measure(subject, baseline.structure, positions)[0]
    if baseline.law.agree(z, baseline.multipliers[:16], positions[0]):
        return True
    if is_beyond_length(subject, far):
        return BEYOND
    long = None if unresolved is None else moving(unresolved.at_length(far + 16).inv_freq)
    if long is not None and replace(baseline.law, inv_freq=long, factor=1.0).explains(z / z.abs(), positions[0]):
        return "the longest row of the batch determines the frequencies of all, as in transformers"
    says = f"Positions 0 to 15 get other angles if another row of the batch is at {far:,}."
    report.add("rows-disturb-each-other", says)
    report.drop("wrong-far-positions")
    return True
