"""Test the other calls of a target: offsets of rows, documents, int32 positions, and other values of its options."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import torch

from ropewalk.tools.check.find.calls import VARIED
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure import gradients, sizes
from ropewalk.tools.check.measure.baseline import POSITIONS_IGNORED, SMALL, Baseline
from ropewalk.tools.check.measure.case import TOKENS, unwritten, usual, where
from ropewalk.tools.check.measure.structure import infer

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
    other = None if baseline.subject.variant is None else baseline.subject.variant("int32")
    if other is None or POSITIONS_IGNORED & {*baseline.report.codes}:
        return False
    positions = usual(other).positions(other)
    with contextlib.suppress(CallError):  # it refuses them
        if not all(replace(baseline, subject=other).matches(positions)):
            says = f"Positions {positions[0].tolist()} in int32 have other angles than in int64."
            baseline.report.add("positions-misread", says)
        return True
    return False


def check_options(baseline: Baseline) -> bool:
    """Test the other pairing, and the inverse rotation, if the target has an option for them."""
    if "wrong-pairing" in baseline.report.codes:
        return False
    results = {option: _judge_option(baseline, option) for option in _options(baseline)}
    for says in (says for _, says in results.values() if says):
        baseline.report.add("option-wrong", says, str(usual(baseline.subject)))
    return bool(results)


def check_gradients(baseline: Baseline) -> bool:
    """Test the gradients of the other calls, unless something is wrong already."""
    if not gradients.are_judged(baseline.report):
        return False
    others = [replace(baseline, subject=call) for call in baseline.subject.others]
    others += [found for option in _options(baseline) if (found := _judge_option(baseline, option)[0]) is not None]
    for other in others:
        case = usual(other.subject, tokens=7, rows=1 if other.subject.has_one_row else 2)
        with contextlib.suppress(CallError):
            if (fault := gradients.find_fault(other, case)) is not None:
                baseline.report.add(fault[0], f"In the call {other.subject.signature}: {fault[1]}", str(case))
                break
    return bool(others)


def _options(baseline: Baseline) -> list[str]:
    """Return the options that the target has."""
    variant = baseline.subject.variant
    return [mode for mode in ("switched", "conjugate") if variant is not None and variant(mode) is not None]


def _judge_option(baseline: Baseline, option: str) -> tuple[Baseline | None, str]:
    """Return what is known of the call with an option, or None and how it is wrong. Both are empty if it is refused."""
    says = ""
    for mode in (mode for mode in VARIED if mode.startswith(option)):
        found = _with_option(baseline, mode)
        if isinstance(found, Baseline):
            with contextlib.suppress(CallError):
                if (fault := sizes.find_fault(found, usual(found.subject))) is None:
                    return found, ""
                says = says or f"With {_text(found.subject)}: {fault[1]}"
        says = says or found if isinstance(found, str) else says
    return None, says


def _with_option(baseline: Baseline, mode: str) -> Baseline | str | None:
    """Return what is known of the call in a mode of `VARIED`, or how it is wrong, or None if it is refused."""
    plain, variant = baseline.structure, baseline.subject.variant
    other = None if variant is None else variant(mode)
    if other is None:
        return None
    if mode == "conjugate":
        law = replace(baseline.law, inv_freq=-baseline.law.inv_freq)
        z, of_k = (m.conj() for m in (baseline.multipliers, baseline.k_multipliers))
        return replace(baseline, subject=other, multipliers=z, k_multipliers=of_k, law=law)
    try:
        structure = infer(other.linear_maps(SMALL[None, :16]))
    except CallError:
        return None
    if structure is None or structure.flaw is not None:
        return f"With {_text(other)}, pairs of channels are not rotated."
    if structure.pairing == plain.pairing:
        return f"With {_text(other)}, the pairing is still {plain.pairing}."
    if (structure.pairs, structure.rotary_offset) != (plain.pairs, plain.rotary_offset):
        return f"With {_text(other)}, {structure.pairs} pairs are rotated instead of {plain.pairs}."
    return replace(baseline, subject=other, structure=structure)


def _text(subject: Subject) -> str:
    """Return the options of a call that differs from the plain one, as `conj=True`."""
    form = subject.form
    roles = dict.fromkeys(role for roles in VARIED.values() for role in roles if role in form.known)
    return ", ".join(
        f"{form.call.parameter_of[role]}={form.known[role]}" for role in roles if role in form.call.parameter_of
    )
