"""Test the calls that models make, such as batches, a single token, fewer key heads than query heads, and views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.find.ways import ONE_ROW
from ropewalk.tools.check.measure import gradients, variants
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, Baseline
from ropewalk.tools.check.measure.case import CLOSE, HEADS, TOKENS, usual, where
from ropewalk.tools.check.measure.positions import name_bug

FIRST = torch.arange(TOKENS)[None]
_OF_POSITIONS = POSITIONS_IGNORED | {"wrong-far-positions"}  # which also make a batch, or a token, wrong


def judge(baseline: Baseline) -> None:
    """Run every test that the subject supports, and add findings and grades to the report."""
    report, used = baseline.report, memory.current()
    tests = {
        "positions passed": _check_offset,
        "one token": _check_one_token,
        "batch": _check_batch,
        "ragged rows": _check_ragged_rows,
        "offsets of rows": variants.check_offsets_of_rows,
        "left padding": variants.check_left_padding,
        "documents in one row": variants.check_documents,
        "int32 positions": variants.check_int32,
        "decoding": variants.check_decoding,
        "fewer key heads": _check_fewer_key_heads,
        "views": _check_views,
        "input unchanged": _check_inputs_unchanged,
        "gradients": gradients.check,
        "gradients of other calls": variants.check_gradients,
    }
    for name, test in tests.items():
        before, used.overwritten[:] = [*report.findings], []
        try:
            if test(baseline):
                is_new = test is _check_views and "strided-input" not in report.codes
                if used.overwritten and is_new:  # `sizes` names the smallest case of others
                    report.add("memory-overwritten", used.overwritten[0])
                new = [finding for finding in report.findings if finding not in before]
                says = new[-1].says if new else "as expected"
                wrong = [f for f in new if f.severity == "wrong" and f.code not in report.ignored]
                report.grade(name, says, False if wrong else None if new else True)
        except CallError as e:
            report.add(e.code, f"In the test of {name}: {e}.")
            report.grade(name, f"{e}", None if e.code == "raises" else False)


# Each test returns False if the subject does not support it.


def _check_offset(baseline: Baseline) -> bool:
    subject, report = baseline.subject, baseline.report
    positions, scattered = FIRST + 7, torch.tensor([[9, 3, 60, 3, 0]])
    if not subject.accepts(positions):
        return False
    if not all(baseline.matches(positions)):
        for name, is_first in zip("qk", baseline.matches(positions, FIRST), strict=False):
            if is_first:
                code = "offset-ignored" if "offset" in subject.way.positions else "positions-ignored"
                report.add(code, f"Tokens of {name} at positions 7 to 11 are rotated by the angles of 0 to 4.")
        if not POSITIONS_IGNORED & {*report.codes}:
            code, says = name_bug(baseline, baseline.measure(positions[0]), positions[0], 0)
            if code not in POSITIONS_IGNORED:
                code, says = (
                    "wrong-far-positions",
                    "Tokens at positions 7 to 11 have other angles than if they begin at 0.",
                )
            report.add(code, says)
    elif subject.accepts(scattered) and not all(baseline.matches(scattered)):
        report.add("positions-ignored", "Positions 9, 3, 60, 3, 0 are not each rotated by their own angle.")
    return True


def _check_one_token(baseline: Baseline) -> bool:
    positions = torch.tensor([[9]])
    if not baseline.subject.accepts(positions) or _OF_POSITIONS & {*baseline.report.codes}:
        return False
    if not all(baseline.matches(positions)):
        says = "A single token at position 9 has other angles than within a sequence."
        baseline.report.add(*_of_heads(baseline.subject, positions) or ("one-token-wrong", says))
    return True


def _of_heads(subject: Subject, positions: Tensor) -> tuple[str, str, str] | None:
    """Return code, description and case of heads that differ at positions although all are passed the same numbers.

    They are what a wrong grid over rows and heads causes, and no wrong positions.
    """
    x = subject.equal_heads(positions.shape[1], HEADS, len(positions))
    for name, out in zip("qk", subject(x, x, positions), strict=True):
        if out is not None and bool((differs := (out - out[:, :, :1]).abs() > CLOSE).any()):
            case = str(usual(subject, rows=len(positions), tokens=positions.shape[1]))
            return "heads-differ", f"Equal heads of {name} are rotated differently{where(differs)}.", case
    return None


def _check_batch(baseline: Baseline) -> bool:
    report = baseline.report
    for tokens, first in ((TOKENS, 0), (1, 9)):
        positions = torch.arange(first, first + tokens).expand(3, tokens)
        if not baseline.subject.accepts(positions):
            continue
        compared = baseline.compare(usual(baseline.subject, rows=3, tokens=tokens), positions)
        right = torch.stack([((out - right).abs() < CLOSE).flatten(1).all(1) for _, _, out, right in compared]).all(0)
        if bool(right[0]) and not bool(right.all()):
            report.add("batch-ignored", f"Of 3 rows with {tokens} token(s) each, only the first is right.")
        elif not bool(right.all()) and not {"one-token-wrong", "heads-differ", *_OF_POSITIONS} & {*report.codes}:
            report.add("batch-ignored", f"The results for 3 rows with {tokens} token(s) each are wrong.")
    return baseline.subject.layout not in ONE_ROW


def _check_ragged_rows(baseline: Baseline) -> bool:
    subject, report = baseline.subject, baseline.report
    positions = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [5, 5, 60, 1, 2]])
    if not subject.accepts(positions):
        if others := [other for other in subject.others if other.accepts(positions)]:
            return _check_ragged_rows(replace(baseline, subject=others[0]))
        if subject.way.positions == "shared":
            report.grade("ragged rows", "not judged: only positions shared by all rows of the batch can be passed")
        return False
    if {"batch-ignored", "one-token-wrong", *_OF_POSITIONS} & {*report.codes}:
        return True
    if not all(baseline.matches(positions)):
        if (found := _of_heads(subject, positions)) is not None:
            report.add(*found)
        elif baseline.matches(positions, positions[:1].expand(3, -1))[0]:
            report.add("first-row-positions", "Rows that begin at 0, 20 and 5 all get the positions of the first row.")
        else:
            report.add("rows-mixed-up", "Rows that begin at 0, 20 and 5 are not each rotated by their own positions.")
    elif not all(baseline.matches(positions[:, 2:3])):
        says = "With one token in each of 3 rows, they are not each rotated by their own position."
        report.add(*_of_heads(subject, positions[:, 2:3]) or ("one-token-wrong", says))
    return True


def _check_fewer_key_heads(baseline: Baseline) -> bool:
    is_free = usual(baseline.subject, k_heads=1).k_heads == 1
    for heads in (2, 1) if is_free else ():
        says = "the result for k is wrong"
        try:
            is_right = baseline.matches(FIRST, k_heads=heads)[-1]
        except CallError as e:
            if e.code == "raises":
                raise
            says, is_right = str(e), False
        if not is_right:
            baseline.report.add("grouped-heads", f"{HEADS} heads of q and {heads} of k: {says}.")
    return is_free


def _views(baseline: Baseline) -> dict[str, list[Tensor]]:
    """Return test tensors q and k in the target's layout, for each way in which models lay them out in memory."""
    inputs, subject = usual(baseline.subject).tensors(), baseline.subject
    q, k = inputs
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "slices of one tensor with q, k and v": lambda x: torch.cat((x, x, x), dim=-1)[..., : x.shape[-1]],
        "views of a tensor with tokens before heads": lambda x: x,
        "views of a tensor with heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second token of a tensor": lambda x: torch.stack((x, -x), dim=2).flatten(1, 2)[:, ::2],
    }
    views = {"contiguous tensors": [subject.to_native(x).contiguous() for x in inputs]}
    views |= {name: [subject.to_native(view(x)) for x in inputs] for name, view in ways.items()}
    heads = torch.split(torch.cat((q, k, q), dim=2), HEADS, dim=2)[:2]
    return views | {"heads of one tensor with q, k and v": [subject.to_native(x) for x in heads]}


def _check_views(baseline: Baseline) -> bool:
    subject = baseline.subject
    for name, (q, k) in _views(baseline).items():
        expected = [baseline.predict(subject.from_native(x).clone(), FIRST, key=x is k) for x in (q, k)]
        for out, right in zip(subject.call_native(q, k, FIRST.clone()), expected, strict=True):
            if out is not None and not bool(((subject.from_native(out) - right).abs() < CLOSE).all()):
                baseline.report.add("strided-input", f"The results for {name} are wrong.")
    if subject.way.given is not None and not subject.form.is_fused:
        halves = replace(
            baseline, subject=replace(subject, way=replace(subject.way, arguments=partial(_halves, subject)))
        )
        with contextlib.suppress(CallError):  # it refuses such tables
            if not all(halves.matches(FIRST)):
                baseline.report.add("strided-input", "The results for tables that are halves of wider ones are wrong.")
    return True


def _halves(subject: Subject, positions: Tensor, q: Tensor) -> dict[str, Any]:
    """Return the arguments for positions and tables, which are halves of wider ones, as if cos and sin were in one."""
    return {
        name: torch.cat((value, -value), dim=-1)[..., : value.shape[-1]]
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in subject.way.arguments(positions, q).items()
    }


def _check_inputs_unchanged(baseline: Baseline) -> bool:
    for name, (q, k) in _views(baseline).items():
        before, positions = (q.clone(), k.clone()), FIRST.clone()
        baseline.subject.call_native(q, k, positions)
        if not baseline.subject.form.in_place and not (torch.equal(q, before[0]) and torch.equal(k, before[1])):
            baseline.report.add("input-changed", f"A call with {name} changes the values of its arguments.")
        if not torch.equal(positions, FIRST):
            baseline.report.add("positions-changed", f"Positions 0 to 4 are {positions[0].tolist()} after a call.")
    return True
