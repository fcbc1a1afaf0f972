"""Test the other calls of a target: offsets of rows, documents in one row, and positions in int32."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import gradients
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, Baseline
from ropewalk.tools.check.measure.case import CLOSE, HEADS, TOKENS, unwritten, usual, waves, where

# Each test returns False if the target has no such call.


def _other_calls(baseline: Baseline, *kinds: str) -> list[Baseline]:
    """Return the measurement with each call of the target that accepts such positions."""
    calls = (baseline.subject, *baseline.subject.others)
    return [replace(baseline, subject=call) for call in calls if call.way.positions in kinds]


def check_offsets_of_rows(baseline: Baseline) -> bool:
    """Test that each row is rotated from its own offset on."""
    positions = torch.arange(TOKENS) + torch.tensor([[9], [20], [7]])
    calls = _other_calls(baseline, "offsets")
    for other in calls:
        try:
            if all(other.matches(positions)):
                continue
            of_first = other.matches(positions, positions[:1].expand(3, -1))[0]
        except CallError:  # its parameter is for one offset
            return False
        does = "all rotated from the first on" if of_first else "not rotated from there on"
        says = f"Rows that begin at offsets 9, 20 and 7 are {does}, in the call {other.subject.signature}."
        baseline.report.add("first-row-positions" if of_first else "offset-ignored", says)
    return bool(calls)


def check_left_padding(baseline: Baseline) -> bool:
    """Test that the results of tokens before position 0, which are padding, are written."""
    positions = torch.arange(TOKENS) + torch.tensor([[-2], [0]])
    calls = _other_calls(baseline, "offsets")
    for other in calls:
        case = usual(other.subject, rows=2)
        try:
            missing, *_ = unwritten(partial(other.subject, *case.tensors(), positions))
        except CallError:
            return False
        if bool(missing.any()):
            says = f"If a row begins at offset -2, as with left padding, q is never written{where(missing)}."
            baseline.report.add("output-not-written", says, str(case))
    return bool(calls)


def check_documents(baseline: Baseline) -> bool:
    """Test that positions restart in each document of a row."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2]])
    calls = _other_calls(baseline, "packed", "runs")
    for other in calls:
        if not all(other.matches(positions)):
            on = other.matches(positions, torch.arange(8)[None])[0]
            says = "positions do not restart in the second and third" if on else "the angles are wrong"
            baseline.report.add("segments-ignored", f"With documents of 4, 1 and 3 tokens in one row, {says}.")
    return bool(calls)


def check_int32(baseline: Baseline) -> bool:
    """Test positions in int32, which engines pass."""
    subject = baseline.subject
    if "positions" not in subject.way.roles or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    other = replace(subject, way=replace(subject.way, arguments=partial(_in_int32, subject)))
    positions = usual(other).positions(other)
    with contextlib.suppress(CallError):  # it refuses them
        if not all(replace(baseline, subject=other).matches(positions)):
            says = f"Positions {positions[0].tolist()} in int32 have other angles than in int64."
            baseline.report.add("positions-misread", says)
        return True
    return False


def _in_int32(subject: Subject, positions: Tensor, q: Tensor) -> dict[str, Any]:
    values = subject.way.arguments(positions, q)
    name = subject.form.call.parameter_of["positions"]
    return values | {name: values[name].int()}


def check_decoding(baseline: Baseline) -> bool:
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
        if start and bool(((keys[:, :start] - known).abs() > CLOSE).any()):
            again = baseline.predict(known, torch.arange(start)[None], key=True)
            is_again = bool(((keys[:, :start] - again).abs() < CLOSE).all())
            how = "rotated again" if is_again else "changed"
            says = f"With {tokens} more token(s), the keys of the {start} before them are {how}."
            baseline.report.add("stored-key-unlike-key", says, str(case))
            return True
        for name, x, out in (("q", q, results.q), ("k", k, keys[:, start:])):
            if (code := _code_of_decoding(baseline, x, out, positions, key=name == "k")) is not None:
                at = f"position {start}" if tokens == 1 else f"positions {start} to {start + tokens - 1}"
                says = f"After {start} tokens, {name} of the next {tokens} is not rotated by {at}."
                baseline.report.add(code, says, str(case))
                return True
        known, start = keys, start + tokens
        values = results.v if results.v is not None and results.v.shape == known.shape else torch.zeros_like(known)
        past = known, values
    return True


def _code_of_decoding(baseline: Baseline, x: Tensor, out: Tensor, positions: Tensor, *, key: bool) -> str | None:
    """Return the code of what is wrong with new tokens after others, or None."""
    from_0, last = positions - positions[0, 0], positions[:, -1:].expand_as(positions)
    explained = {
        None: positions,
        "offset-ignored": from_0,
        "positions-off-by-one": positions + 1,
        "positions-ignored": last,
    }
    for code, places in explained.items():
        if bool(((out - baseline.predict(x, places, key=key)).abs() < CLOSE).all()):
            return code
    return "one-token-wrong" if positions.shape[1] == 1 else "wrong-far-positions"


def check_gradients(baseline: Baseline) -> bool:
    """Test the gradients of the other calls, unless something is wrong already."""
    if not gradients.are_judged(baseline.report):
        return False
    others = [replace(baseline, subject=call) for call in baseline.subject.others]
    for other in others:
        case = usual(other.subject, tokens=7, rows=1 if other.subject.has_one_row else 2)
        with contextlib.suppress(CallError):
            if (fault := gradients.find_fault(other, case)) is not None:
                baseline.report.add(fault[0], f"In the call {other.subject.signature}: {fault[1]}", str(case))
                break
    return bool(others)
