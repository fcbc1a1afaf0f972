"""Find out how to call a target: try each candidate call on a few numbers, and choose the one that rotates best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import Layout
from ropewalk.conformance import construct, roles, structure
from ropewalk.conformance.candidates import GIVEN_CHANNELS, TableSet, candidates
from ropewalk.conformance.construct import Arguments, Settings
from ropewalk.conformance.subject import CallError, Subject
from ropewalk.conformance.target import Target


def find(target: Target, settings: Settings, call: str | None, layout: Layout | None) -> Subject:
    """Return the target as a `Subject`, which calls it in the way that rotates best.

    Raises:
        RopeError: no candidate call works. The message says what the target raised.
    """
    first, arguments = _construct(target.objects[0], settings)
    second = target.objects[1] if len(target.objects) == 2 else None
    errors: list[str] = []
    best: tuple[int, Subject] | None = None
    for subject in candidates(first, second, arguments, call):
        if layout is not None and subject.layout != layout:
            continue
        score = _score(subject, settings, errors)
        if score is not None and (best is None or score > best[0]):
            best = score, subject
    if best is None:
        raise _checks.error(
            "check",
            f"{target.name} must be callable in a known way, and rotate tensors",
            errors[0] if errors else "no known parameters",
            'Describe its parameters with --call "q,k,cos,sin", --layout or --arg.',
        )

    def rebuild(base: float | None = None) -> Subject:
        new, arguments = _construct(target.objects[0], settings if base is None else replace(settings, base=base))
        chosen = best[1]
        return next(
            subject
            for subject in candidates(new, second, arguments, call)
            if (subject.signature, subject.layout, subject.positions, subject.tables)
            == (chosen.signature, chosen.layout, chosen.positions, chosen.tables)
        )

    constructed = arguments is not None and first is not target.objects[0]
    return replace(best[1], rebuild=rebuild if constructed else None)


def _construct(target: Any, settings: Settings) -> tuple[Any, Arguments | None]:
    """Construct the object, or compute its tables, and return the result with the arguments that were used.

    A function that rotates is returned unchanged, with None instead of arguments.
    """
    if construct.is_constructor(target):
        arguments = construct.choose_arguments(target, settings)
        return construct.build(target, arguments.values), arguments
    parameters = roles.parameters(target) or {}
    constructor_roles = roles.constructor_roles(target)
    if "dim" in constructor_roles and not {"q", "x"} & {*_call_roles(target)} and len(parameters) > 1:
        arguments = construct.choose_arguments(target, settings)
        return TableSet(construct.build(target, arguments.values)), arguments
    if settings.arguments:
        must = "arguments (--arg) require a class, or a function that computes all tables"
        names = ", ".join(settings.arguments)
        raise _checks.error("check", must, f"{names} for a function that is called with tokens", "Drop them.")
    return target, None


def _call_roles(target: Any) -> roles.Roles:
    try:
        return roles.call_roles(target, None)
    except _checks.RopeError:
        return {}


def channels_of(subject: Subject, settings: Settings) -> int:
    """Return the number of channels of the heads that `check` passes to the subject."""
    return GIVEN_CHANNELS if subject.given_tables else settings.channels or settings.head_dim


_TOKENS, _HEADS = 5, 3


def _score(subject: Subject, settings: Settings, errors: list[str]) -> int | None:
    """Score how much a candidate call behaves like a rotation. Return None, and append to `errors`, if it raises."""
    channels = channels_of(subject, settings)
    positions = torch.arange(_TOKENS)[None]
    numbers = torch.sin(1 + torch.arange(channels, dtype=torch.float32))
    try:
        with torch.no_grad():
            x = numbers.expand(1, _TOKENS, _HEADS, channels)
            out, _ = subject(x, x, positions)
            found = structure.infer(linear_maps(subject, channels, positions))
    except CallError as e:
        errors.append(str(e))
        return None
    differs_by_head = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    differs_by_token = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = 12 * (differs_by_token and not differs_by_head) + 1 * _accepts_rows(subject, channels)
    if found is not None:
        score += (
            {None: 10, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
        )
    return score


def _accepts_rows(subject: Subject, channels: int) -> bool:
    """Return whether the subject accepts a batch of three rows with the same positions."""
    positions = torch.arange(_TOKENS).expand(3, -1)
    if not subject.accepts(positions):
        return False
    x = torch.ones(3, _TOKENS, 2, channels)
    try:
        subject(x, x, positions)
    except CallError:
        return False
    return True


def linear_maps(subject: Subject, channels: int, positions: Tensor, of: str = "q") -> Tensor:
    """Measure the linear map that the subject applies to q (or k) at each position.

    The subject is called with one head for each channel, which is 1 in that channel and 0 elsewhere.

    Args:
        subject: the subject.
        channels: the number of channels of a head.
        positions: `[1, seq]`.
        of: "q" or "k".

    Returns:
        `[seq, out channels, in channels]`.

    Raises:
        CallError: the subject raises, or `of` is "k" and it takes no k.
    """
    eye = torch.eye(channels).expand(1, positions.shape[1], channels, channels).contiguous()
    q_out, k_out = subject(eye, eye.clone(), positions)
    out = q_out if of == "q" else k_out
    if out is None:
        raise CallError("it accepts no k")
    return out[0].mT
