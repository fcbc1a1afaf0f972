"""Find out how to call a target: try the common ways on a few numbers, and take the one that rotates best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import Layout
from ropewalk.conformance import construct, roles, structure, ways
from ropewalk.conformance.construct import Arguments, Settings
from ropewalk.conformance.subject import CallError, Subject
from ropewalk.conformance.target import Target
from ropewalk.conformance.ways import Built


def find(target: Target, settings: Settings, call: str | None, layout: Layout | None) -> Subject:
    """Return the target as a `Subject`.

    Raises:
        RopeError: no known way of calling it works. The message says what the target raised.
    """
    first, arguments = _construct(target.objects[0], settings)
    second = target.objects[1] if len(target.objects) == 2 else None
    why: list[str] = []
    best: tuple[int, Subject] | None = None
    for subject in ways.candidates(first, second, arguments, call):
        if layout is not None and subject.layout != layout:
            continue
        score = _score(subject, settings, why)
        if score is not None and (best is None or score > best[0]):
            best = score, subject
    if best is None:
        raise _checks.error(
            "check",
            f"{target.name} must rotate tensors in one of the known ways",
            why[0] if why else "no known parameters",
            'Describe its parameters with --call "q,k,cos,sin", --layout or --arg.',
        )

    def rebuild(base: float | None = None) -> Subject:
        asked = settings if base is None else replace(settings, base=base)
        another, arguments = _construct(target.objects[0], asked)
        wanted = best[1]
        return next(
            one
            for one in ways.candidates(another, second, arguments, call)
            if (one.signature, one.layout, one.positions, one.tables)
            == (wanted.signature, wanted.layout, wanted.positions, wanted.tables)
        )

    constructed = arguments is not None and first is not target.objects[0]
    return replace(best[1], rebuild=rebuild if constructed else None)


def _construct(found: Any, settings: Settings) -> tuple[Any, Arguments | None]:
    """Construct the object or the tables, and return it with the arguments. A function is returned as is."""
    if construct.is_maker(found):
        arguments = construct.choose_arguments(found, settings)
        return construct.build(found, arguments.values), arguments
    named = roles.parameters(found) or {}
    makes = roles.constructor_roles(found)
    if "dim" in makes and not {"q", "x"} & {*_call_roles(found)} and len(named) > 1:
        arguments = construct.choose_arguments(found, settings)
        return Built(construct.build(found, arguments.values)), arguments
    return found, None


def _call_roles(found: Any) -> roles.Roles:
    try:
        return roles.call_roles(found, None)
    except _checks.RopeError:
        return {}


def channels_of(subject: Subject, settings: Settings) -> int:
    """The number of channels of the heads that are passed to the subject."""
    return ways.GIVEN_CHANNELS if subject.given_tables else settings.channels or settings.head_dim


_TOKENS, _HEADS = 5, 3


def _score(subject: Subject, settings: Settings, why: list[str]) -> int | None:
    """How much a way of calling behaves like a rotation. None if it raises."""
    channels = channels_of(subject, settings)
    positions = torch.arange(_TOKENS)[None]
    numbers = torch.sin(1 + torch.arange(channels, dtype=torch.float32))
    try:
        with torch.no_grad():
            x = numbers.expand(1, _TOKENS, _HEADS, channels)
            out, _ = subject(x, x, positions)
            found = structure.infer(linear_maps(subject, channels, positions))
    except CallError as e:
        why.append(str(e))
        return None
    heads = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    tokens = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = 12 * (tokens and not heads) + 1 * _accepts_rows(subject, channels)
    if found is not None:
        score += (
            {None: 10, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
        )
    return score


def _accepts_rows(subject: Subject, channels: int) -> bool:
    """Whether a batch of three rows works, with separate positions for each row if they can be passed."""
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
    """The linear map of q (or k) at each of these positions, `[seq, out channels, in channels]`.

    The function is called with one head for each channel, which is 1 in that channel and 0 elsewhere.
    """
    eye = torch.eye(channels).expand(1, positions.shape[1], channels, channels).contiguous()
    q_out, k_out = subject(eye, eye.clone(), positions)
    out = q_out if of == "q" else k_out
    if out is None:
        raise CallError("it takes no k")
    return out[0].mT
