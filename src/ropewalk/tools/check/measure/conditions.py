"""Test the calls that models make, such as batches, a single token, documents, decoding, and views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import memory, uses
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import gradients
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, Baseline
from ropewalk.tools.check.measure.case import HEADS, TOKENS, unwritten, usual, waves, where

FIRST = torch.arange(TOKENS)[None]
_RAGGED = torch.tensor([[0, 1, 2, 3, 4], [20, 21, 22, 23, 24], [5, 5, 60, 1, 2]])
_AS_MANY = FIRST.flip(1) + 7 * torch.arange(HEADS)[:, None]  # rows as heads, which tables without their axis mix up
_OFFSETS = FIRST + torch.tensor([[9], [20], [7]])
_DOCUMENTS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2]])

# The kinds of calls that each test is for, or () for all; and positions, with the code of the bug if nothing explains
# the results.
_CALLS: dict[str, tuple[tuple[str, ...], list[tuple[Tensor, str]]]] = {
    "positions passed": (
        (),
        [(FIRST + 7, "wrong-far-positions"), (torch.tensor([[9, 3, 60, 3, 0]]), "positions-ignored")],
    ),
    "one token": ((), [(torch.tensor([[9]]), "one-token-wrong")]),
    "batch": ((), [(FIRST.expand(3, -1), "batch-ignored"), (torch.full((3, 1), 9), "batch-ignored")]),
    "ragged rows": (
        (),
        [(_AS_MANY, "rows-mixed-up"), (_RAGGED, "rows-mixed-up"), (_RAGGED[:, 2:3], "one-token-wrong")],
    ),
    "offsets of rows": (("offsets",), [(_OFFSETS, "offset-ignored")]),
    "offset into tables": (("offset",), [(FIRST + 7, "offset-ignored")]),
    "documents in one row": (("packed", "runs"), [(_DOCUMENTS, "segments-ignored")]),
}
_EXPLAINED = POSITIONS_IGNORED | {"wrong-far-positions", "one-token-wrong", "batch-ignored"}
"""The findings that also make calls with other positions wrong."""


def judge(baseline: Baseline) -> None:
    """Run every test that the subject supports, and add findings and grades to the report."""
    for name, (kinds, calls) in _CALLS.items():
        baseline.report.test(name, partial(_check_calls, baseline, kinds, calls))
    tests: dict[str, Callable[[Baseline], bool | str]] = {
        "left padding": _check_left_padding,
        "int32 positions": _check_int32,
        "positions of k": _check_positions_of_k,
        "decoding": _check_decoding,
        "tokens before": _check_before,
        "views": _check_views,
        "gradients": gradients.check,
    }
    for name, test in tests.items():
        baseline.report.test(name, partial(test, baseline))


# Each test returns False if the subject does not support it.


def _check_calls(baseline: Baseline, kinds: tuple[str, ...], calls: list[tuple[Tensor, str]]) -> bool | str:
    subject, tried = baseline.subject, False
    if _EXPLAINED & {*baseline.report.codes}:
        return False
    of_kind = [call for call in (subject, *subject.others) if not kinds or call.way.positions in kinds]
    for positions, otherwise in calls:
        accepting = [call for call in of_kind if call.accepts(positions)]
        if not accepting:
            break
        moved = [] if accepting[0].way.positions == "packed" else [positions + 1, positions - 1]
        shifted = [("positions-off-by-one", other) for other in moved] + _one_position(positions)
        first, *others = [replace(baseline, subject=call) for call in accepting]
        try:
            is_wrong = first.judge(positions, otherwise, *shifted)
            is_wrong = is_wrong or any(o.judge(positions, otherwise, *shifted) for o in others if _indexes_tables(o))
        except CallError:
            if not subject.of_grid and (not kinds or (kinds == ("offset",) and _starts_tables(subject))):
                raise
            break  # a parameter that is for one offset or for something else, or too many tokens of a grid
        tried = True
        if is_wrong:
            break
    if not tried and not kinds and subject.way.positions == "shared":
        return "not judged: only positions shared by all rows of the batch can be passed"
    return tried


def _starts_tables(subject: Subject) -> bool:
    """Return whether the code takes a slice of tables from the offset on, and is not passed a channel, for example."""
    name = subject.form.call.parameter_of.get("offset", "")
    return uses.roles(subject.form.function).get(name) == "offset"


def _indexes_tables(baseline: Baseline) -> bool:
    """Return whether a call passes positions as well as tables, and is right for one row."""
    if baseline.subject.way.positions == "rows":
        with contextlib.suppress(CallError):  # it ignores positions, and takes a row of the tables for each token
            results = baseline.compare(usual(baseline.subject), FIRST + 7)
            return all(bool(((out - right).abs() < baseline.subject.close).all()) for *_, out, right in results)
    return False


def _one_position(positions: Tensor) -> list[tuple[str, Tensor]]:
    return [("one-position", positions[:, i : i + 1].expand_as(positions)) for i in (0, positions.shape[1] - 1)]


def _check_left_padding(baseline: Baseline) -> bool:
    """Test that the results of tokens before position 0, which are padding, are written."""
    positions = FIRST + torch.tensor([[-2], [0]])
    calls = [call for call in (baseline.subject, *baseline.subject.others) if call.way.positions == "offsets"]
    for call in calls:
        case = usual(call, rows=2)
        try:
            missing, *_ = unwritten(partial(call, *case.tensors(), positions))
        except CallError:
            return False
        if bool(missing.any()):
            says = f"If a row begins at offset -2, as with left padding, q is never written{where(missing)}."
            baseline.report.add("output-not-written", says, str(case))
    return bool(calls)


def _passing(baseline: Baseline, change: Callable[[Tensor], Tensor]) -> Baseline:
    """Return the measurement with calls that pass each tensor of positions and tables as `change` returns it."""
    subject = baseline.subject

    def arguments(positions: Tensor, q: Tensor) -> dict[str, Any]:
        return {name: memory.map_tensors(value, change) for name, value in subject.way.arguments(positions, q).items()}

    return replace(baseline, subject=replace(subject, way=replace(subject.way, arguments=arguments)))


def _check_int32(baseline: Baseline) -> bool:
    """Test positions in int32, which engines pass."""
    if "positions" not in baseline.subject.way.roles or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    other = _passing(baseline, lambda t: t if t.is_floating_point() else t.int())
    with contextlib.suppress(CallError):  # it refuses them
        other.judge(usual(other.subject).positions(other.subject), "positions-misread")
        return True
    return False


def _check_positions_of_k(baseline: Baseline) -> bool:
    """Test a call whose k has other positions than q, if a parameter states them."""
    roles, way = baseline.subject.form.call.parameter_of, baseline.subject.way
    name = next((roles[role] for role in ("k_positions", "k_offset") if role in roles), "")
    if not name or name not in way.arguments(FIRST, torch.zeros(1)) or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False

    def arguments(positions: Tensor, q: Tensor) -> dict[str, Any]:
        return {n: value + 3 * (n == name) for n, value in way.arguments(positions, q).items()}

    subject = replace(baseline.subject, way=replace(way, arguments=arguments))
    case = usual(subject)
    results = zip("qk", case.tensors(), subject(*case.tensors(), FIRST), (FIRST, FIRST + 3), strict=True)
    for of, x, out, positions in results:
        if out is not None and (found := baseline.fault(of, x, out, positions, "key-unlike-query")) is not None:
            baseline.report.add("key-unlike-query", f"If k begins at position 3 and q at 0, {found[1]}", str(case))
            break
    return True


def _check_decoding(baseline: Baseline) -> bool:
    """Test calls with the keys and values of earlier tokens: a prompt of 5 tokens, then one token, then 3."""
    subject, known = baseline.subject, torch.zeros(1, 0, HEADS, baseline.subject.channels)
    if "past_k" not in subject.form.call.parameter_of or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    past, start = None, 0
    for tokens in (TOKENS, 1, 3):
        case, positions = usual(subject, tokens=tokens), start + torch.arange(tokens)[None]
        (q, k), v = case.tensors(), waves(1, tokens, case.k_heads, case.channels, 3)
        results = subject.fused(q, k, positions, v=v, past=past)
        if results.k is None or results.k.shape[1] not in (tokens, start + tokens):
            return False
        keys = results.k if results.k.shape[1] == start + tokens else torch.cat((known, results.k), dim=1)
        if start and bool(((keys[:, :start] - known).abs() > subject.close).any()):
            says = f"With {tokens} more token(s), the keys of the {start} before them are changed."
            baseline.report.add("stored-key-unlike-key", says, str(case))
            return True
        otherwise = "one-token-wrong" if tokens == 1 else "wrong-far-positions"
        shifted = ("offset-ignored", positions - start), ("positions-off-by-one", positions + 1)
        explanations = (*shifted, *_one_position(positions))
        for name, x, out in (("q", q, results.q), ("k", k, keys[:, start:])):
            if (found := baseline.fault(name, x, out, positions, otherwise, *explanations)) is not None:
                baseline.report.add(found[0], f"After {start} tokens, {found[1]}", str(case))
                return True
        known, start = keys, start + tokens
        values = results.v if results.v is not None and results.v.shape == known.shape else torch.zeros_like(known)
        past = known, values
    return True


def _check_before(baseline: Baseline) -> bool:
    """Test a call with two tokens before those that rotate, if a parameter says how many there are."""
    subject, case = baseline.subject.after(2), usual(baseline.subject, tokens=TOKENS + 2)
    if subject is None or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    inputs = case.tensors()
    for name, x, out in zip("qk", inputs, subject(*inputs, FIRST), strict=True):
        right = torch.cat((x[:, :2], baseline.predict(x[:, 2:], FIRST, key=name == "k")), dim=1)
        if out is not None and bool((wrong := (out - right).abs() > subject.close).any()):
            says = f"With 2 tokens before the first that rotates, {name} is wrong{where(wrong)}."
            baseline.report.add("tokens-before-rotated", says, str(case))
            return True
    return True


def _views(subject: Subject) -> dict[str, list[Tensor]]:
    """Return test tensors q and k in the target's layout, for each way in which models lay them out in memory."""
    inputs = q, k = [x.to(subject.form.dtype) for x in usual(subject).tensors()]
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
    """Test the results for views, and that neither they nor positions and tables are overwritten."""
    report, used = baseline.report, memory.current()
    passed: list[tuple[Tensor, Tensor]] = []

    def keep(t: Tensor) -> Tensor:
        passed.append((t, t.clone()))
        return t

    subject = _passing(baseline, keep).subject
    used.overwritten.clear()
    for name, (q, k) in _views(subject).items():
        before = q.clone(), k.clone()
        expected = [baseline.predict(subject.from_native(x).clone(), FIRST, key=x is k) for x in (q, k)]
        for out, right in zip(subject.call_native(q, k, FIRST.clone()), expected, strict=True):
            if out is not None and not bool(((subject.from_native(out) - right).abs() < subject.close).all()):
                report.add("strided-input", f"The results for {name} are wrong.")
        if not subject.form.in_place and not (torch.equal(q, before[0]) and torch.equal(k, before[1])):
            report.add("input-changed", f"A call with {name} changes the values of its arguments.")
    if (changed := next((old for new, old in passed if not torch.equal(new, old)), None)) is not None:
        what = "tables" if changed.is_floating_point() or changed.is_complex() else "positions"
        report.add("arguments-changed", f"A call changes the {what} that it is passed, as a later one would find them.")
    if used.overwritten and "strided-input" not in report.codes:
        report.add("memory-overwritten", used.overwritten[0])
    if subject.way.given is not None and not subject.form.is_fused:
        with contextlib.suppress(CallError):  # it refuses such tables
            results = _passing(baseline, _half_of_a_wider_one).compare(usual(subject), FIRST)
            if not all(bool(((out - right).abs() < subject.close).all()) for *_, out, right in results):
                report.add("strided-input", "The results for tables that are halves of wider ones are wrong.")
    return True


def _half_of_a_wider_one(t: Tensor) -> Tensor:
    return torch.cat((t, -t), dim=-1)[..., : t.shape[-1]] if t.is_floating_point() else t
