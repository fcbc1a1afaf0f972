"""Test what fused functions do besides the rotation: values that pass through, norms of each head, slots of a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find.form import Results, Stored
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure.baseline import Baseline
from ropewalk.tools.check.measure.case import CLOSE, Case, first_fault, usual, waves, where
from ropewalk.tools.check.report import Report

_SLOTS = (25, 3, 30, 11, 6, 18, 0, 9)  # of the tokens of a call, in any order


def judge_passed(subject: Subject, report: Report) -> bool:
    """Test that v passes unchanged, and which slots are written. Return whether what is stored prevents other tests."""
    if not {"v", "slots"} & subject.form.takes:
        return False
    found, _ = first_fault(_cases(subject), partial(_passed_fault, subject))
    if found is not None:
        report.add(*found)
        if found[0] != "value-changed":
            report.grade("slots", found[1], False)
            return True
    if "slots" in subject.form.takes:
        report.grade("slots", "as expected", True)
    return False


def judge(baseline: Baseline) -> None:
    """Test the norms, and that what is stored is the rotated key."""
    subject, report = baseline.subject, baseline.report
    tests = ("weights", "norm", _norm_fault), ("slots", "stored keys", _stored_fault)
    for name, fault in ((name, fault) for takes, name, fault in tests if takes in subject.form.takes):
        found, _ = first_fault(_cases(subject), partial(fault, baseline))
        if found is not None:
            report.add(*found)
        report.grade(name, found[1] if found else "as expected", found is None)


def _cases(subject: Subject) -> Iterator[Case]:
    """Yield the sizes to try: heads whose numbers are no powers of two, and one token, after the usual ones."""
    for tokens, heads, k_heads in ((5, 8, 8), (5, 3, 3), (5, 6, 3), (5, 5, 1), (1, 12, 4), (1, 1, 1), (7, 6, 2)):
        yield usual(subject, tokens=tokens, heads=heads, k_heads=k_heads)


def _call(subject: Subject, case: Case, *, padding: bool = False, **options: Any) -> Results:
    """Call a fused target with values, slots (each second of which is -1 with `padding`), and weights of its norm."""
    q, k = case.tensors()
    v = waves(case.rows, case.tokens, case.k_heads, case.channels, 3)
    slots = torch.tensor(_SLOTS[: case.tokens])[None]
    slots = torch.where(torch.arange(case.tokens) % 2 == 1, -1, slots) if padding else slots
    return subject.fused(q, k, case.positions(subject), v=v, slots=slots, **options)


def _passed_fault(subject: Subject, case: Case) -> tuple[str, str] | None:
    results = _call(subject, case)
    v = waves(case.rows, case.tokens, case.k_heads, case.channels, 3)
    has_v = results.v is not None and results.v.shape == v.shape  # the third result may be a cache
    if has_v and bool((wrong := (results.v - v).abs() > 0).any()):  # type: ignore[operator]
        return "value-changed", f"v is changed{where(wrong)}."
    for padding in (False, True) if results.stored is not None else ():
        stored = _call(subject, case, padding=padding).stored
        if stored is not None and (found := _slots_fault(stored, v)) is not None:
            return found
    if results.stored is not None:
        with contextlib.suppress(CallError):  # it refuses caches that are not contiguous
            stored = _call(subject, case, halves=True).stored
            if stored is not None and (found := _slots_fault(stored, v)) is not None:
                return found[0], f"Keys and values follow each other in each block of one tensor. {found[1]}"
    return None


def _slots_fault(stored: Stored, v: Tensor) -> tuple[str, str] | None:
    """Return what is wrong with the slots that a call has written."""
    all_slots = stored.slots.flatten()
    is_token = all_slots >= 0
    expected = {*all_slots[is_token].tolist()}
    for name, before, after in (
        ("keys", stored.keys_before, stored.keys),
        ("values", stored.values_before, stored.values),
    ):
        if before is None or after is None:
            continue
        changed = (before != after).flatten(1)
        written = {*changed.any(1).nonzero().flatten().tolist()}
        if not written and expected:
            return "cache-not-written", f"No slot of the {name} is changed."
        others, missing = written - expected, expected - written
        if others and not missing:
            if parts := {slot for slot in others if not bool(changed[slot].all())}:
                says = f"The {name} of slots {_list(parts)} are changed in part"
                return "memory-overwritten", f"{says}, and slots {_list(expected)} are written."
            if not bool(is_token.all()):
                return "padding-stored", f"With slots {all_slots.tolist()}, {name} are stored in slots {_list(others)}."
        if others or missing:
            says = f"With slots {all_slots.tolist()}, {name} are stored in slots {_list(written)}."
            return "wrong-slot", says
    rows = v.flatten(0, 1)
    if stored.values is not None and expected:
        there = stored.values[all_slots[is_token]]
        if bool(((there - rows[is_token]).abs() > CLOSE).any()):
            if _are_of_other_tokens(there, rows):
                return "wrong-slot", f"With slots {all_slots.tolist()}, the values of other tokens are in these slots."
            if bool(((there - rows[is_token]).abs().flatten(1).amax(1) < CLOSE).any()):
                return "memory-overwritten", f"Values in slots {_list(expected)} are overwritten by those of others."
            return "value-changed", "The values that are stored are not those that are passed."
    return None


def _are_of_other_tokens(there: Tensor, rows: Tensor) -> bool:
    """Return whether each of the stored rows is that of some token."""
    return all(bool(((row - rows).abs() < CLOSE).flatten(1).all(1).any()) for row in there)


def _fits(out: Tensor, right: Tensor) -> bool:
    return bool(((out - right).abs() < CLOSE).all())


def _list(slots: set[int]) -> str:
    return ", ".join(map(str, sorted(slots)[:8]))


def norm_weights(channels: int) -> tuple[Tensor, Tensor]:
    """Return different weights of the norms of q and of k."""
    w = 1 + 0.5 * waves(1, 1, 2, channels, 4)[0, 0]
    return w[0], w[1]


def normed(subject: Subject, x: Tensor, weight: Tensor | float) -> Tensor:
    """Return the norm of each head, or of all heads together, in float64."""
    x = x.double()
    axes = (-2, -1) if subject.form.of_all_heads else (-1,)
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + subject.form.eps) * weight


def _norm_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Compare with the norm of each head by its own weight, then the rotation."""
    form = baseline.subject.form
    if form.added[0] != form.added[1]:
        q, k = ("1 + weight" if added else "weight" for added in form.added)
        return "wrong-norm", f"The norm of q multiplies by {q}, and that of k by {k}."
    for eps in (form.eps, 0.5) if "eps" in form.call.parameter_of else (form.eps,):
        subject = replace(baseline.subject, form=replace(form, eps=eps))
        if (found := _norm_fault_at(replace(baseline, subject=subject), case)) is not None:
            return found
    return None


def _norm_fault_at(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    subject, weights, positions = baseline.subject, norm_weights(case.channels), case.positions(baseline.subject)
    results = _call(subject, case, weights=weights)
    for name, x, out, weight in zip("qk", case.tensors(), (results.q, results.k), weights, strict=True):
        if out is None or _fits(out, baseline.predict(normed(subject, x, weight), positions, key=name == "k")):
            continue
        whole = "all heads together" if subject.form.of_all_heads else "each head"
        return "wrong-norm", f"The norm of {name} is not that of {whole}, before the rotation and with its own weight."
    return None


def _stored_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Compare the stored keys with the rotated keys."""
    subject, positions = baseline.subject, case.positions(baseline.subject)
    weights = norm_weights(case.channels) if "weights" in subject.form.takes else None
    results = _call(subject, case, weights=weights)
    if results.stored is None:
        return None
    _, k = case.tensors()
    key = k.double() if weights is None else normed(subject, k, weights[1])
    there = results.stored.keys[results.stored.slots.flatten()]
    right = baseline.predict(key, positions, key=True).flatten(0, 1)
    if _fits(there, right):
        return None
    if _are_of_other_tokens(there, right):
        slots = results.stored.slots.flatten().tolist()
        return "wrong-slot", f"With slots {slots}, the keys of other tokens are in these slots."
    return "stored-key-unlike-key", "What is stored for k is not the rotated key."
