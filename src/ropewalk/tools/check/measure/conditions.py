"""Test the calls that models make, such as batches, a single token, fewer key heads than query heads, and views."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import gradients
from ropewalk.tools.check.measure.baseline import HEADS, TOKENS, Baseline
from ropewalk.tools.check.measure.case import CLOSE, where

FIRST = torch.arange(TOKENS)[None]
_POSITIONS_IGNORED = {"positions-ignored", "offset-ignored"}


def judge(baseline: Baseline) -> None:
    """Run every test that the subject supports, and add findings and grades to the report."""
    report, used = baseline.report, memory.current()
    tests = {
        "positions passed": _check_offset,
        "one token": _check_one_token,
        "batch": _check_batch,
        "ragged rows": _check_ragged_rows,
        "offsets of rows": _check_offsets_of_rows,
        "left padding": _check_left_padding,
        "documents in one row": _check_documents,
        "fewer key heads": _check_fewer_key_heads,
        "views": _check_views,
        "input unchanged": _check_inputs_unchanged,
        "gradients": gradients.check,
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


def _differ(*errors: Tensor) -> bool:
    """Return whether any error is at least CLOSE, or NaN."""
    return not all(bool((error < CLOSE).all()) for error in errors)


# Each test returns False if the subject does not support it.


def _check_offset(baseline: Baseline) -> bool:
    subject, report = baseline.subject, baseline.report
    positions, scattered = torch.arange(7, 7 + TOKENS)[None], torch.tensor([[9, 3, 60, 3, 0]])
    if not subject.accepts(positions):
        return False
    if _differ(*baseline.errors(positions)):
        x = baseline.tensor(1, TOKENS, HEADS, 1)
        for i, out in enumerate(subject(x, x.clone(), positions)):
            if out is not None and not _differ((out - baseline.predict(x, FIRST, key=bool(i))).abs()):
                code = "offset-ignored" if subject.positions == "offset" else "positions-ignored"
                report.add(code, f"Tokens of {'qk'[i]} at positions 7 to 11 are rotated by the angles of 0 to 4.")
        if not _POSITIONS_IGNORED & {*report.codes}:
            says = "Tokens at positions 7 to 11 have other angles than in a sequence that starts at 0."
            report.add("wrong-far-positions", says)
    elif subject.accepts(scattered) and _differ(*baseline.errors(scattered)):
        report.add("positions-ignored", "Positions 9, 3, 60, 3, 0 are not each rotated by their own angle.")
    return True


def _check_one_token(baseline: Baseline) -> bool:
    positions = torch.tensor([[9]])
    if not baseline.subject.accepts(positions) or _POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    if _differ(*baseline.errors(positions)):
        baseline.report.add("one-token-wrong", "A single token at position 9 has other angles than within a sequence.")
    return True


def _check_batch(baseline: Baseline) -> bool:
    report = baseline.report
    for tokens, first in ((TOKENS, 0), (1, 9)):
        positions = torch.arange(first, first + tokens).expand(3, tokens)
        if not baseline.subject.accepts(positions):
            continue
        q_off, k_off = baseline.errors(positions)
        if _differ(q_off[1:], k_off[1:]) and not _differ(q_off[:1], k_off[:1]):
            report.add("batch-ignored", f"Of 3 rows with {tokens} token(s) each, only the first is right.")
        elif _differ(q_off, k_off) and not {"one-token-wrong", *_POSITIONS_IGNORED} & {*report.codes}:
            report.add("batch-ignored", f"The results for 3 rows with {tokens} token(s) each are wrong.")
    return baseline.subject.layout != "thd"


def _check_ragged_rows(baseline: Baseline) -> bool:
    subject, report = baseline.subject, baseline.report
    positions = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [5, 5, 60, 1, 2]])
    if not subject.accepts(positions):
        if subject.positions == "shared":
            report.grade("ragged rows", "not judged: only positions shared by all rows of the batch can be passed")
        return False
    found = {"batch-ignored", "positions-ignored", "one-token-wrong"} & {*report.codes}
    if _differ(*baseline.errors(positions)) and not found:
        x = baseline.tensor(3, TOKENS, HEADS, 1)
        out, _ = subject(x, x.clone(), positions)
        if not _differ((out - baseline.predict(x, positions[:1].expand(3, -1))).abs()):
            report.add("first-row-positions", "Rows that begin at 0, 20 and 5 all get the positions of the first row.")
        else:
            report.add("rows-mixed-up", "Rows that begin at 0, 20 and 5 are not each rotated by their own positions.")
    elif _differ(*baseline.errors(positions[:, 2:3])) and not found:
        says = "With one token in each of 3 rows, they are not each rotated by their own position."
        report.add("one-token-wrong", says)
    return True


def _check_offsets_of_rows(baseline: Baseline) -> bool:
    positions = torch.arange(TOKENS) + torch.tensor([[9], [20], [7]])
    calls = [call for call in baseline.subject.others if call.positions == "offsets"]
    for call in calls:
        if _differ(*replace(baseline, subject=call).errors(positions)):
            x = baseline.tensor(3, TOKENS, HEADS, 1)
            out, _ = call(x, x.clone(), positions)
            of_first = not _differ((out - baseline.predict(x, positions[:1].expand(3, -1))).abs())
            does = "all rotated from the first on" if of_first else "not rotated from there on"
            says = f"Rows that begin at offsets 9, 20 and 7 are {does}, in the call {call.signature}."
            baseline.report.add("first-row-positions" if of_first else "offset-ignored", says)
    return bool(calls)


def _check_left_padding(baseline: Baseline) -> bool:
    """Test that the results of tokens before position 0, which are padding, are written."""
    positions = torch.arange(TOKENS) + torch.tensor([[-2], [0]])
    used, calls = (
        memory.current(),
        [c for c in (baseline.subject, *baseline.subject.others) if c.positions == "offsets"],
    )
    for call in calls:
        x = baseline.tensor(2, TOKENS, HEADS, 1)
        try:
            out, _ = call(x, x.clone(), positions)
            used.poison, poison = False, used.poison
            plain, _ = call(x, x.clone(), positions)
            used.poison = poison
        except CallError:
            return False
        if bool((unwritten := out.isnan() & ~plain.isnan()).any()):
            says = f"If a row begins at offset -2, as with left padding, q is never written{where(unwritten)}."
            baseline.report.add("output-not-written", says, str(baseline.usual(rows=2)))
    return bool(calls)


def _check_documents(baseline: Baseline) -> bool:
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2]])
    calls = [call for call in (baseline.subject, *baseline.subject.others) if call.positions in ("packed", "runs")]
    for call in calls:
        packed = replace(baseline, subject=call)
        if _differ(*packed.errors(positions)):
            x = baseline.tensor(1, 8, HEADS, 1)
            out, _ = call(x, x.clone(), positions)
            on = not _differ((out - baseline.predict(x, torch.arange(8)[None])).abs())
            says = "positions do not restart in the second and third" if on else "the angles are wrong"
            baseline.report.add("segments-ignored", f"With documents of 4, 1 and 3 tokens in one row, {says}.")
    return bool(calls)


def _check_fewer_key_heads(baseline: Baseline) -> bool:
    is_free = baseline.subject.has_k and "stack" not in baseline.subject.takes
    for heads in (2, 1) if is_free else ():
        says = "the result for k is wrong"
        try:
            _, k_off = baseline.errors(FIRST, heads)
            wrong = _differ(k_off)
        except CallError as e:
            if e.code == "raises":
                raise
            says, wrong = str(e), True
        if wrong:
            baseline.report.add("grouped-heads", f"{HEADS} heads of q and {heads} of k: {says}.")
    return is_free


def _views(baseline: Baseline) -> dict[str, list[Tensor]]:
    """Return test tensors q and k in the target's layout, for each way in which models lay them out in memory."""
    views: dict[str, list[Tensor]] = {}
    for seed in (1, 2):
        x = baseline.tensor(1, TOKENS, HEADS, seed)
        for name, view in {
            "slices of one tensor with q, k and v": torch.cat((x, x, x), dim=-1)[..., : x.shape[-1]],
            "views of a tensor with tokens before heads": x,
            "views of a tensor with heads before tokens": x.transpose(1, 2).contiguous().transpose(1, 2),
            "every second token of a tensor": torch.stack((x, -x), dim=2).flatten(1, 2)[:, ::2],
        }.items():
            views.setdefault(name, []).append(baseline.subject.to_native(view))
    q, k = (baseline.tensor(1, TOKENS, HEADS, seed) for seed in (1, 2))
    heads = torch.split(torch.cat((q, k, q), dim=2), HEADS, dim=2)[:2]
    views["heads of one tensor with q, k and v"] = [baseline.subject.to_native(x) for x in heads]
    contiguous = [x.contiguous() for x in views["views of a tensor with tokens before heads"]]
    return {"contiguous tensors": contiguous} | views


def _check_views(baseline: Baseline) -> bool:
    subject = baseline.subject
    for name, (q, k) in _views(baseline).items():
        expected = [baseline.predict(subject.from_native(x).clone(), FIRST, key=x is k) for x in (q, k)]
        for out, right in zip(subject.call_native(q, k, FIRST.clone()), expected, strict=True):
            if out is not None and _differ((subject.from_native(out) - right).abs()):
                baseline.report.add("strided-input", f"The results for {name} are wrong.")
    if subject.given is not None and not subject.form.is_fused:
        halves = replace(baseline, subject=replace(subject, angles=partial(_halves, subject)))
        with contextlib.suppress(CallError):  # it refuses such tables
            if _differ(*halves.errors(FIRST)):
                baseline.report.add("strided-input", "The results for tables that are halves of wider ones are wrong.")
    return True


def _halves(subject: Subject, q: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments for positions and tables, which are halves of wider ones, as if cos and sin were in one."""
    return {
        name: torch.cat((value, -value), dim=-1)[..., : value.shape[-1]]
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in subject.angles(q, positions).items()
    }


def _check_inputs_unchanged(baseline: Baseline) -> bool:
    for name, (q, k) in _views(baseline).items():
        before, positions = (q.clone(), k.clone()), FIRST.clone()
        baseline.subject.call_native(q, k, positions)
        if not baseline.subject.in_place and not (torch.equal(q, before[0]) and torch.equal(k, before[1])):
            baseline.report.add("input-changed", f"A call with {name} changes the values of its arguments.")
        if not torch.equal(positions, FIRST):
            baseline.report.add("positions-changed", f"Positions 0 to 4 are {positions[0].tolist()} after a call.")
    return True
