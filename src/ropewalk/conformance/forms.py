"""How a target wants to be called: the common ways are tried on a few numbers, and the one that rotates is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk._layout import Layout
from ropewalk.conformance import construct, roles, structure, ways
from ropewalk.conformance.construct import Made, Wishes
from ropewalk.conformance.subject import Refused, Subject
from ropewalk.conformance.target import Target
from ropewalk.conformance.ways import Built


def find(target: Target, wishes: Wishes, call: str | None, layout: Layout | None) -> Subject:
    """The target as a `Subject`.

    Raises:
        RopeError: no known way of calling it rotates anything; the message says what it raised.
    """
    first, made = _built(target.objects[0], wishes)
    second = target.objects[1] if len(target.objects) == 2 else None
    why: list[str] = []
    best: tuple[int, Subject] | None = None
    for subject in ways.of(first, second, made, call):
        if layout is not None and subject.layout != layout:
            continue
        score = _score(subject, wishes, why)
        if score is not None and (best is None or score > best[0]):
            best = score, subject
    if best is None:
        raise _checks.error(
            "check",
            f"{target.name} must rotate tensors in one of the known ways",
            why[0] if why else "no known parameters",
            'Say what its parameters are: --call "q,k,cos,sin", --layout, --arg.',
        )

    def fresh(base: float | None = None) -> Subject:
        asked = wishes if base is None else replace(wishes, base=base)
        again, remade = _built(target.objects[0], asked)
        wanted = best[1]
        return next(
            one
            for one in ways.of(again, second, remade, call)
            if (one.shape, one.layout, one.positions, one.tables)
            == (wanted.shape, wanted.layout, wanted.positions, wanted.tables)
        )

    can_be_made_again = made is not None and first is not target.objects[0]
    return replace(best[1], fresh=fresh if can_be_made_again else None)


def _built(found: Any, wishes: Wishes) -> tuple[Any, Made | None]:
    """The object, or the function as it is; and what a class or a maker of tables was given."""
    if construct.is_maker(found):
        made = construct.arguments(found, wishes)
        return construct.make(found, made.given), made
    named = roles.parameters(found) or {}
    makes = roles.of_constructor(found)
    if "dim" in makes and not {"q", "x"} & {*_named_call(found)} and len(named) > 1:
        made = construct.arguments(found, wishes)
        return Built(construct.make(found, made.given)), made
    return found, None


def _named_call(found: Any) -> roles.Roles:
    try:
        return roles.of_call(found, None)
    except _checks.RopeError:
        return {}


def channels_of(subject: Subject, wishes: Wishes) -> int:
    """Channels of the heads that it is given."""
    return ways.GIVEN_CHANNELS if subject.ours else wishes.channels or wishes.head_dim


_TOKENS, _HEADS = 5, 3


def _score(subject: Subject, wishes: Wishes, why: list[str]) -> int | None:
    """How much a way of calling does what rotation does; None where it raises."""
    channels = channels_of(subject, wishes)
    positions = torch.arange(_TOKENS)[None]
    numbers = torch.sin(1 + torch.arange(channels, dtype=torch.float32))
    try:
        with torch.no_grad():
            x = numbers.expand(1, _TOKENS, _HEADS, channels)
            out, _ = subject(x, x, positions)
            found = structure.of(matrices(subject, channels, positions))
    except Refused as e:
        why.append(str(e))
        return None
    heads = bool((out - out[:, :, :1]).abs().max() > 1e-5)
    tokens = bool((out - out[:, :1]).abs().max() > 1e-5)
    score = 12 * (tokens and not heads) + 1 * _takes_rows(subject, channels)
    if found is not None:
        score += (
            {None: 10, "not-a-rotation": 6}.get(found.flaw, 2)
            + 4 * (found.order == "same")
            + 2 * (found.pairing is not None)
        )
    return score


def _takes_rows(subject: Subject, channels: int) -> bool:
    """Whether a batch of three does not raise, with positions of each row's own where they can be passed."""
    positions = torch.arange(_TOKENS).expand(3, -1)
    if not subject.takes(positions):
        return False
    x = torch.ones(3, _TOKENS, 2, channels)
    try:
        subject(x, x, positions)
    except Refused:
        return False
    return True


def matrices(subject: Subject, channels: int, positions: Tensor, of: str = "q") -> Tensor:
    """What is done to q (or k) at these positions, `[seq, out channels, in channels]`: a head for each channel."""
    eye = torch.eye(channels).expand(1, positions.shape[1], channels, channels).contiguous()
    q_out, k_out = subject(eye, eye.clone(), positions)
    out = q_out if of == "q" else k_out
    if out is None:
        raise Refused("it takes no k")
    return out[0].mT
