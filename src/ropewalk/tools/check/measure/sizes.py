"""Call the target with other numbers of rows, tokens and heads, and name the smallest case at which it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.tables import INDEXED
from ropewalk.tools.check.find.ways import ONE_TOKEN
from ropewalk.tools.check.measure.baseline import SMALL, Baseline
from ropewalk.tools.check.measure.case import HEADS, KNOWN, TOKENS, Case, first_fault, unwritten, usual, where

# (rows, tokens, heads of q, heads of k): each call has several sizes at which kernels fail.
_FEW = ((1, TOKENS, HEADS, HEADS), (1, 33, 3, 1), (2, 1, 12, 4), (2, 7, 5, 5))
_ALL = (
    *((1, 1, 1, 1), (1, 2, 12, 4), (2, 3, 3, 3), (1, 5, 5, 1), (1, 7, 7, 7), (1, 31, 3, 1), (3, 32, 5, 5)),
    *((1, 33, 12, 3), (2, 63, 2, 1), (1, 64, 1, 1), (1, 65, 5, 5), (1, 127, 3, 3), (2, 128, 4, 2), (1, 129, 12, 4)),
    (1, 2049, 6, 2),  # more tokens and heads than programs that a launch on a GPU has at a time
)
_NOT_OF_RESULTS = {"no-gradient", "wrong-gradient", "in-place-gradient", "input-changed", "arguments-changed"}


def judge(baseline: Baseline, sure: Collection[str]) -> bool | str:
    """Compare the results of all sizes, unless steps after those of the `sure` findings found that some are wrong."""
    if baseline.subject.layout in ONE_TOKEN:
        return "not judged: a call takes one token of one head"
    new = {f.code for f in baseline.report.findings if f.severity == "wrong"} - {*sure} - _NOT_OF_RESULTS
    return f"not judged: {', '.join(sorted(new))}" if new else judge_all(baseline, find_fault)


def judge_all(
    baseline: Baseline, fault: Callable[[Baseline, Case], tuple[str, str] | None], *, few: bool = False, call: str = ""
) -> bool | str:
    """Report the first case with a fault, as the smallest with the same code. Return what is refused, or True."""
    found, raised = first_fault(_cases(baseline, few), partial(fault, baseline))
    if found is not None:
        code, says, case = found
        of_heads = code in ("size-dependent", "wrong-shape") and case.heads != case.k_heads
        baseline.report.add("grouped-heads" if of_heads else code, call + says, str(case))
    return f"fails: {raised}" if raised else True


def _cases(baseline: Baseline, few: bool) -> Iterator[Case]:
    """Yield the cases to try: those that the subject accepts, and for which the right result is known."""
    subject, arguments = baseline.subject, baseline.subject.arguments
    has_law = baseline.law.explains(baseline.multipliers, SMALL)
    limits = subject.expected.length, arguments and arguments.length, 0 if has_law else KNOWN
    indexed = (subject.way.tables or "").startswith(INDEXED)
    for rows, tokens, heads, k_heads in _FEW if few else _ALL:
        case = usual(subject, rows=rows, tokens=tokens, heads=heads, k_heads=k_heads)
        positions = case.positions(subject)
        last = max(int(positions.max()), tokens - 1 if indexed else 0)  # of the rows that tables get
        if subject.accepts(positions) and all(last < n for n in limits if n):
            yield case


def find_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Return the code of what is wrong in one call, and a description in one sentence, or None."""
    subject, used, positions = baseline.subject, memory.current(), case.positions(baseline.subject)
    used.overwritten.clear()
    results = [*baseline.compare(case, positions)]
    close = baseline.tolerance(positions)
    if used.overwritten:
        return "memory-overwritten", used.overwritten[0]
    for i, (name, x, out, right) in enumerate(results):
        wrong = ~((out - right).abs() < close)
        if not bool(wrong.any()):
            continue
        if bool(out.isnan().any()) and bool(unwritten(partial(subject, *case.tensors(), positions))[i].any()):
            return "output-not-written", f"{name} is never written{where(out.isnan())}."
        if not bool(wrong[..., baseline.structure.outs.flatten()].any()):
            return "rest-not-passed", f"{name} is changed{where(wrong)}."
        what = "wrong"
        if torch.equal(out[wrong], x[wrong]):
            what = "not rotated"
        elif not bool(out[wrong].any()):
            what = "zero"
        return "size-dependent", f"{name} is {what}{where(wrong)}."
    return None
