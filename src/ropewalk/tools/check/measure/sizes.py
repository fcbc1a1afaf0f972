"""Call the target with other numbers of rows, tokens and heads, and name the smallest case at which it is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CallError
from ropewalk.tools.check.measure import law
from ropewalk.tools.check.measure.baseline import Baseline
from ropewalk.tools.check.measure.case import CLOSE, KNOWN, Case, smallest_fault, where

# (rows, tokens, heads of q, heads of k): each call has several sizes at which kernels fail.
_SIZES = (
    *(
        (1, 1, 1, 1),
        (1, 2, 12, 4),
        (2, 3, 3, 3),
        (1, 5, 5, 1),
        (1, 7, 7, 7),
        (1, 31, 3, 1),
        (3, 32, 5, 5),
        (1, 33, 12, 3),
    ),
    *((2, 63, 2, 1), (1, 64, 1, 1), (1, 65, 5, 5), (1, 127, 3, 3), (2, 128, 4, 2), (1, 129, 12, 4)),
)
_NOT_OF_RESULTS = {"no-gradient", "wrong-gradient", "in-place-gradient", "input-changed", "positions-changed"}


def judge(baseline: Baseline, sure: Collection[str], *, few: bool = False) -> None:
    """Report the first case that is wrong, as the smallest case that is wrong in the same way.

    Args:
        baseline: the first measurement, with which calls of other sizes are compared.
        sure: the codes of findings in it. Nothing is tried if later steps have found that results are wrong.
        few: whether to try three cases instead of all.
    """
    report, fails = baseline.report, ""
    new = {f.code for f in report.findings if f.severity == "wrong"} - {*sure} - _NOT_OF_RESULTS
    if new:
        report.grade("sizes", f"not judged: {', '.join(sorted(new))}")
        return
    for case in islice(_cases(baseline), 3, 6) if few else _cases(baseline):
        try:
            fault = find_fault(baseline, case)
        except CallError as e:
            fault, fails = None if e.code == "raises" else (e.code, f"{e}."), fails or f"{e} ({case})"
        if fault is None:
            continue
        code, says, smallest = smallest_fault(case, partial(find_fault, baseline), fault)
        report.add(code, says, smallest)
        report.grade("sizes", f"wrong with {smallest}", False)
        return
    report.grade("sizes", f"fails: {fails}" if fails else "as expected", None if fails else True)


def _cases(baseline: Baseline) -> Iterator[Case]:
    """Yield the cases to try: those that the subject accepts, and for which the right result is known."""
    subject, arguments = baseline.subject, baseline.subject.arguments
    is_free = subject.has_k and "stack" not in subject.takes
    has_law = baseline.law.error(baseline.multipliers, torch.arange(KNOWN)) < law.CLOSE
    limits = (baseline.expected.length, arguments.length if arguments is not None else None, 0 if has_law else KNOWN)
    for rows, tokens, heads, k_heads in _SIZES:
        case = Case(rows, tokens, heads, k_heads if is_free else heads, subject.channels)
        positions = case.positions(subject)
        if subject.accepts(positions) and all(int(positions.max()) < n for n in limits if n):
            yield case


def find_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Return the code of what is wrong in one call, and a description in one sentence, or None.

    Raises:
        CallError: the call fails.
    """
    subject, used = baseline.subject, memory.current()
    positions, (q, k) = case.positions(subject), case.tensors()
    used.overwritten.clear()
    results = subject(q, k, positions)
    if used.overwritten:
        return "memory-overwritten", used.overwritten[0]
    for name, x, out in zip("qk", (q, k), results, strict=True):
        if out is None:
            continue
        right = baseline.predict(x, positions, key=name == "k")
        wrong = ~((out - right).abs() < CLOSE)
        if not bool(wrong.any()):
            continue
        if bool(out.isnan().any()) and not was_written(baseline, case, name, out):
            return "output-not-written", f"{name} is never written{where(out.isnan())}."
        what = "wrong"
        if torch.equal(out[wrong], x[wrong]):
            what = "not rotated"
        elif not bool(out[wrong].any()):
            what = "zero"
        elif not bool(out[wrong].isfinite().any()):
            what = "not finite"
        return "size-dependent", f"{name} is {what}{where(wrong)}."
    return None


def was_written(baseline: Baseline, case: Case, name: str, out: Tensor) -> bool:
    """Return whether NaN in a result is computed: it is also there if new memory does not hold NaN."""
    used = memory.current()
    used.poison, poison = False, used.poison
    try:
        q, k = case.tensors()
        again = baseline.subject(q, k, case.positions(baseline.subject))["qk".index(name)]
    finally:
        used.poison = poison
    return again is not None and bool(again[out.isnan()].isnan().all())
