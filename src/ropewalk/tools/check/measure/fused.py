"""Test what fused functions do besides the rotation: values that pass through, norms of each head, slots of a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find.form import Results, Stored
from ropewalk.tools.check.find.subject import CallError, Subject
from ropewalk.tools.check.measure.baseline import Baseline
from ropewalk.tools.check.measure.case import Case, waves, where
from ropewalk.tools.check.measure.sizes import judge_all


def judge(baseline: Baseline, *, few: bool = False) -> None:
    """Test that v passes unchanged, the norms, and which slots receive which keys and values."""
    tests = ("v", "values", _value_fault), ("weights", "norm", _norm_fault), ("slots", "slots", _stored_fault)
    for takes, name, fault in tests:
        if takes in baseline.subject.form.takes:
            baseline.report.test(name, partial(judge_all, baseline, fault, few=few))


def _call(subject: Subject, case: Case, *, padding: bool = False, **options: Any) -> tuple[Tensor, Results]:
    """Call a fused target with values, which are returned, and slots, each second of which is -1 with `padding`."""
    q, k = case.tensors()
    v = waves(case.rows, case.tokens, case.k_heads, case.channels, 3)
    n = case.rows * case.tokens
    slots = (1 + 5 * ((n * torch.arange(n) + 4) % (2 * n + 1))).view(case.rows, -1)  # in another order, with gaps
    slots = torch.where(torch.arange(case.tokens) % 2 == 1, -1, slots) if padding else slots
    return v, subject.fused(q, k, case.positions(subject), v=v, slots=slots, **options)


def _mixes_rows(baseline: Baseline, case: Case) -> bool:
    """Return whether the rotation of several rows is wrong, as by the positions of another row."""
    results = baseline.compare(case, case.positions(baseline.subject)) if case.rows > 1 else ()
    return any(bool(((out - right).abs() > baseline.subject.close).any()) for *_, out, right in results)


def _value_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    v, results = _call(baseline.subject, case)
    if results.v is None or results.v.shape != v.shape:  # the third result may be a cache
        return None
    wrong = (results.v - v).abs() > 0
    return ("value-changed", f"v is changed{where(wrong)}.") if bool(wrong.any()) else None


def _stored_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Compare the caches with the rotated keys and the values in the slots that are passed."""
    subject, (_, k) = baseline.subject, case.tensors()
    weights = norm_weights(subject, case.channels) if "weights" in subject.form.takes else None
    key = k.double() if weights is None else normed(subject, k, weights[1])
    keys = baseline.predict(key, case.positions(subject), key=True).flatten(0, 1)
    close = subject.close + subject.rounding(keys)
    for options in ({}, {"padding": True}, {"halves": True}):
        # It may refuse caches that are not contiguous.
        with contextlib.suppress(CallError) if "halves" in options else contextlib.nullcontext():
            v, results = _call(subject, case, weights=weights, **options)
            found = None if results.stored is None else _slots_fault(results.stored, keys, v.flatten(0, 1), close)
            if found is not None and found[0] == "stored-key-unlike-key" and _mixes_rows(baseline, case):
                return None
            if found is not None:
                how = "Keys and values follow each other in each block of one tensor. " if "halves" in options else ""
                return found[0], how + found[1]
    return None


def _slots_fault(stored: Stored, keys: Tensor, values: Tensor, close: float) -> tuple[str, str] | None:
    """Return what is wrong with the slots that a call has written, or with their keys and values `[tokens, …]`."""
    slots = stored.slots.flatten()
    is_token = slots >= 0
    expected = {*slots[is_token].tolist()}
    for name, after, right in (("values", stored.values, values), ("keys", stored.keys, keys)):
        if after is None or not expected:
            continue
        changed = (stored.keys_before != after).flatten(1)
        written = {*changed.any(1).nonzero().flatten().tolist()}
        others, missing = written - expected, expected - written
        if not written:
            return "cache-not-written", f"No slot of the {name} is changed."
        if others and not missing:
            if bool(is_token.all()) or any(not bool(changed[slot].all()) for slot in others):
                says = f"The {name} of slots {_list(others)} are changed"
                return "memory-overwritten", f"{says}, and slots {_list(expected)} are written."
            return "padding-stored", f"With slots {slots.tolist()}, {name} are stored in slots {_list(others)}."
        if others or missing:
            return "wrong-slot", f"With slots {slots.tolist()}, {name} are stored in slots {_list(written)}."
        there = after[slots[is_token]]
        is_right = ((there - right[is_token]).abs() < close).flatten(1).all(1)
        if bool(is_right.all()):
            continue
        if all(bool(((row - right).abs() < close).flatten(1).all(1).any()) for row in there):
            return "wrong-slot", f"With slots {slots.tolist()}, the {name} of other tokens are in these slots."
        if name == "keys":
            return "stored-key-unlike-key", "What is stored for k is not the rotated key."
        return "value-changed", "The values that are stored are not those that are passed."
    return None


def _list(slots: set[int]) -> str:
    return ", ".join(map(str, sorted(slots)[:8]))


def norm_weights(subject: Subject, channels: int) -> tuple[Tensor, Tensor]:
    """Return different weights of the norms of q and of k, if each has its own."""
    w = 1 + 0.5 * waves(1, 1, 2, channels, 4)[0, 0]
    return w[0], w[0 if subject.form.shares_norm else 1]


def normed(subject: Subject, x: Tensor, weight: Tensor | float) -> Tensor:
    """Return the norm of each head, or of all heads together, in float64."""
    x = x.double()
    axes = (-2, -1) if subject.form.of_all_heads else (-1,)
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + subject.form.eps) * weight


def _norm_fault(baseline: Baseline, case: Case) -> tuple[str, str] | None:
    """Compare with the norm of each head by its own weight, then the rotation."""
    own = baseline.subject
    form, weights, positions = own.form, norm_weights(own, case.channels), case.positions(own)
    if form.added[0] != form.added[1]:
        q, k = ("1 + weight" if added else "weight" for added in form.added)
        return "wrong-norm", f"The norm of q multiplies by {q}, and that of k by {k}."

    def is_near(out: Tensor, right: Tensor) -> bool:
        return bool(((out - right).abs() < own.close + own.rounding(right)).all())

    for eps in (form.eps, 0.5) if "eps" in form.call.parameter_of else (form.eps,):
        subject = replace(own, form=replace(form, eps=eps))
        _, results = _call(subject, case, weights=weights)
        for key, (x, out) in enumerate(zip(case.tensors(), (results.q, results.k), strict=True)):
            rotate = partial(baseline.predict, positions=positions, key=bool(key))
            norms = _norms(subject, x, weights[key], weights[1 - key], rotate, own)
            otherwise = "not the expected one, before the rotation and with its own weight"
            if out is not None and (fault := next((name for name, right in norms if is_near(out, right)), otherwise)):
                if fault == otherwise and _mixes_rows(baseline, case):
                    return None
                return "wrong-norm", f"The norm of {'qk'[key]} is {fault}."
    return None


def _norms(
    subject: Subject, x: Tensor, weight: Tensor, other: Tensor, rotate: Callable[[Tensor], Tensor], unset: Subject
) -> Iterator[tuple[str, Tensor]]:
    """Yield the result for q or k without a fault, "", and that with each known fault."""
    form = subject.form
    of_others = replace(subject, form=replace(form, of_all_heads=not form.of_all_heads))
    yield "", rotate(normed(subject, x, weight))
    yield "taken after the rotation", normed(subject, rotate(x), weight)
    yield "multiplied by the weight of the other", rotate(normed(subject, x, other))
    yield "not multiplied by its weight", rotate(normed(subject, x, 1.0))
    whole, each = ("each head", "all heads together") if form.of_all_heads else ("all heads together", "each head")
    yield f"that of {whole}, and not of {each}", rotate(normed(of_others, x, weight))
    yield "taken with another eps than the one that is passed", rotate(normed(unset, x, weight))
