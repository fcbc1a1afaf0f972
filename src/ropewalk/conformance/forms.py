"""How a target wants to be called: the common ways are tried on a few numbers, and the one that rotates is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks
from ropewalk._layout import Layout
from ropewalk.conformance import construct, roles, structure, tables
from ropewalk.conformance.construct import Made, Wishes
from ropewalk.conformance.subject import Refused, Subject
from ropewalk.conformance.target import Target

LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "thd")
GIVEN_CHANNELS, GIVEN_BASE = 16, 100.0  # of the tables that a function is given


def find(target: Target, wishes: Wishes, call: str | None, layout: Layout | None) -> Subject:
    """The target as a `Subject`.

    Raises:
        RopeError: no known way of calling it rotates anything; the message says what it raised.
    """
    first, made = _built(target.objects[0], wishes)
    second = target.objects[1] if len(target.objects) == 2 else None
    why: list[str] = []
    best: tuple[int, Subject] | None = None
    for subject in _candidates(first, second, made, wishes, call):
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
            for one in _candidates(again, second, remade, asked, call)
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
        return _Built(construct.make(found, made.given)), made
    return found, None


class _Built:
    """Tables for all positions, made once by a function such as `precompute_freqs_cis`."""

    def __init__(self, made: Any) -> None:
        self.tables = (made,) if isinstance(made, Tensor) else tuple(made)


def _named_call(found: Any) -> roles.Roles:
    try:
        return roles.of_call(found, None)
    except _checks.RopeError:
        return {}


def _candidates(first: Any, second: Any, made: Made | None, wishes: Wishes, call: str | None) -> Iterator[Subject]:
    module = first if isinstance(first, torch.nn.Module) else getattr(first, "__self__", None)
    module = module if isinstance(module, torch.nn.Module) else None
    if second is not None:
        ways = _pairs(first, second, wishes, call)
    else:
        known = roles.of_call(first, call) if not isinstance(first, _Built) else {}
        if {"cos", "sin"} <= {*known} or "table" in known:
            ways = _given(first, known, wishes)
        elif {"q", "k"} <= {*known} or "x" in known:
            ways = _own(first, known)
        else:
            raise _checks.error(
                "check",
                "TARGET must take q and k, or x",
                f"parameters {list(roles.parameters(first) or {})}",
                'Say what they are: --call "x,positions". To a maker of tables add the function: file.py:make,apply.',
            )
    for subject in ways:
        yield replace(subject, module=module, made=made)


def _arguments(known: roles.Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {known["q"]: q, known["k"]: k} if "k" in known else {known["x"]: q}


def _layouts(known: roles.Roles) -> tuple[Layout, ...]:
    """Hugging Face's functions, which have unsqueeze_dim, mean heads before tokens."""
    return ("bhsd", "bshd", "thd") if "axis" in known else LAYOUTS


def _shape(function: Any, known: roles.Roles) -> str:
    return f"f({', '.join(name for name in roles.parameters(function) or {} if name in known.values())})"


def _given(function: Any, known: roles.Roles, wishes: Wishes) -> Iterator[Subject]:
    """A function that is given tables: all widths and axes."""
    single = "table" in known
    channels = GIVEN_CHANNELS
    rope = Rope(channels, GIVEN_BASE, "half")
    for layout in _layouts(known):
        for axes in ("s",) if layout == "thd" else tables.AXES:
            for axis in (1, 2) if "axis" in known else (None,):
                for width in tables.SINGLE if single else tables.PAIRED:

                    def prepared(
                        q: Tensor,
                        k: Tensor | None,
                        positions: Tensor,
                        axes: Any = axes,
                        axis: Any = axis,
                        width: Any = width,
                    ) -> Any:
                        at = rope.at(positions, dtype=torch.float64)
                        angles = positions[..., None] * torch.from_numpy(rope.inv_freq)
                        kept = tables.written(at.cos, at.sin, angles, width)
                        dtype = q.dtype if not width.startswith("angles") else torch.float32
                        kept = tuple(t if t.is_complex() else t.to(dtype) for t in kept)
                        given = _arguments(known, q, k)
                        names = ("table",) if single else ("cos", "sin")
                        given |= {known[n]: tables.with_axes(t, axes) for n, t in zip(names, kept, strict=True)}
                        return function, given | ({} if axis is None else {known["axis"]: axis})

                    yield Subject(
                        _shape(function, known),
                        layout,
                        "k" in known,
                        "shared" if axes == "s" else "rows",
                        True,
                        prepared,
                        tables=width,
                    )


def _own(function: Any, known: roles.Roles) -> Iterator[Subject]:
    """Something that has angles of its own."""
    for layout in LAYOUTS:
        modes = ("rows", "shared") if "positions" in known else ("offset",) if "offset" in known else ("none",)
        for mode in modes:
            if layout == "thd" and mode == "rows":
                continue

            def prepared(q: Tensor, k: Tensor | None, positions: Tensor, mode: str = mode) -> Any:
                return function, _arguments(known, q, k) | _where(known, positions, mode)

            yield Subject(_shape(function, known), layout, "k" in known, mode, False, prepared)  # type: ignore[arg-type]


def _where(known: roles.Roles, positions: Tensor, mode: str) -> dict[str, Any]:
    if mode == "rows":
        return {known["positions"]: positions}
    if mode == "shared":
        return {known["positions"]: positions[0]}
    return {known["offset"]: int(positions[0, 0])} if mode == "offset" else {}


def _pairs(first: Any, second: Any, wishes: Wishes, call: str | None) -> Iterator[Subject]:
    """What makes tables, and the function that takes them."""
    taker = roles.of_call(second, call)
    single = "table" in taker
    make = _maker(first, wishes)
    for layout in _layouts(taker):
        for axes in ("s",) if layout == "thd" else tables.AXES:
            for axis in (1, 2) if "axis" in taker else (None,):

                def prepared(q: Tensor, k: Tensor | None, positions: Tensor, axes: Any = axes, axis: Any = axis) -> Any:
                    kept = make(q, positions)
                    names = ("table",) if single else ("cos", "sin")
                    given = _arguments(taker, q, k)
                    given |= {taker[n]: tables.with_axes(t, axes) for n, t in zip(names, kept, strict=True)}
                    return second, given | ({} if axis is None else {taker["axis"]: axis})

                yield Subject(
                    f"tables, then {_shape(second, taker)}",
                    layout,
                    "k" in taker,
                    "shared" if axes == "s" else "rows",
                    False,
                    prepared,
                    tables=f"{axes} {axis}",
                )


def _maker(first: Any, wishes: Wishes) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """q and positions → tables with axes batch and seq."""
    if isinstance(first, _Built):

        def look_up(q: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return tuple(t[positions] for t in first.tables)

        return look_up
    known = roles.of_call(first, None)

    def call(q: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        given: dict[str, Any] = {known["x"]: q} if "x" in known else {}
        if "positions" in known:
            made = first(**given, **{known["positions"]: positions})
        elif "seq_len" not in known:
            made = first(**{known["x"]: positions})
        else:
            made = first(**given, **{known["seq_len"]: int(positions.max()) + 1})
        kept = (made,) if isinstance(made, Tensor) else tuple(t for t in made if isinstance(t, Tensor))
        if "seq_len" not in known:
            return tuple(
                t if t.shape[0] == positions.shape[0] else t.expand(positions.shape[0], *t.shape[1:]) for t in kept
            )
        return tuple(t.reshape(-1, t.shape[-1])[positions] for t in kept)

    if not ({"positions", "seq_len", "x"} & {*known}):
        raise _checks.error(
            "check",
            "what makes the tables must take positions or a length",
            f"parameters {list(roles.parameters(first) or {})}",
            "Name a function that takes x and positions alone, if it rotates by itself.",
        )
    return call


def channels_of(subject: Subject, wishes: Wishes) -> int:
    """Channels of the heads that it is given."""
    return GIVEN_CHANNELS if subject.ours else wishes.channels or wishes.head_dim


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
    score = 6 * (tokens and not heads)
    if found is not None:
        score += (
            {None: 5, "not-a-rotation": 3}.get(found.flaw, 1)
            + 2 * (found.order == "same")
            + (found.pairing is not None)
        )
    return score


def matrices(subject: Subject, channels: int, positions: Tensor, of: str = "q") -> Tensor:
    """What is done to q (or k) at these positions, `[seq, out channels, in channels]`: a head for each channel."""
    eye = torch.eye(channels).expand(1, positions.shape[1], channels, channels).contiguous()
    q_out, k_out = subject(eye, eye.clone(), positions)
    out = q_out if of == "q" else k_out
    if out is None:
        raise Refused("it takes no k")
    return out[0].mT
