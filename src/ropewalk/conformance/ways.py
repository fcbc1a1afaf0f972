"""The common ways of calling a rotation, each as a `Subject`: with tables, with its own angles, or two in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks
from ropewalk._layout import Layout
from ropewalk.conformance import roles, tables
from ropewalk.conformance.construct import Made
from ropewalk.conformance.subject import Positions, Subject

LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd", "thd")
GIVEN_CHANNELS, GIVEN_BASE = 16, 100.0  # of the tables that a function is given

Tables = tuple[Tensor, ...]


class Built:
    """Tables for all positions, made once by a function such as `precompute_freqs_cis`."""

    def __init__(self, made: Any) -> None:
        self.tables = _tensors(made)


@dataclass(frozen=True)
class Source:
    """Where tables come from.

    Args:
        name: of the kind of tables.
        make: q in the layout of the function and positions `[batch, seq]` → tables with axes batch and seq.
        counts: whether it can be given positions; else they are counted from 0.
    """

    name: str
    make: Callable[[Tensor, Tensor], Tables]
    counts: bool = False


def of(first: Any, second: Any, made: Made | None, call: str | None) -> Iterator[Subject]:
    """Every way to call the target that its parameters allow.

    Raises:
        RopeError: they allow none; the message says how to say what they are.
    """
    if second is not None:
        ways = _taken(second, roles.of_call(second, call), _made_tables(first), ours=False)
    else:
        known = {} if isinstance(first, Built) else roles.of_call(first, call)
        if {"cos", "sin"} <= {*known} or "table" in known:
            ways = _taken(first, known, _our_tables("table" in known), ours=True)
        elif {"q", "k"} <= {*known} or "x" in known:
            ways = _own(first, known)
        else:
            raise _checks.error(
                "check",
                "TARGET must take q and k, or x",
                f"parameters {_named(first)}",
                'Say what they are: --call "x,positions". To a maker of tables add the function: file.py:make,apply.',
            )
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in ways:
        yield replace(subject, module=module, made=made)


def _named(function: Any) -> str:
    return "that are tables" if isinstance(function, Built) else ", ".join(roles.parameters(function) or {}) or "none"


def _arguments(known: roles.Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {known["q"]: q, known["k"]: k} if "k" in known else {known["x"]: q}


def _shape(function: Any, known: roles.Roles) -> str:
    named = [*(roles.parameters(function) or sorted(known.values()))]
    return f"f({', '.join(name for name in named if name in known.values())})"


def _own(function: Any, known: roles.Roles) -> Iterator[Subject]:
    """Something that has angles of its own."""
    modes: tuple[Positions, ...] = ("none",)
    if "positions" in known:
        modes = ("rows", "shared")
    elif "offset" in known:
        modes = ("offset",)
    by_name = roles.by_name(function)
    for mode in modes:
        for layout in LAYOUTS:
            if layout == "thd" and mode == "rows":
                continue

            def prepared(q: Tensor, k: Tensor | None, positions: Tensor, mode: Positions = mode) -> Any:
                given = _arguments(known, q, k)
                if mode == "offset":
                    given[known["offset"]] = int(positions[0, 0])
                elif mode != "none":
                    given[known["positions"]] = positions if mode == "rows" else positions[0]
                return by_name, given

            yield Subject(_shape(function, known), layout, "k" in known, mode, False, prepared)


def _taken(function: Any, known: roles.Roles, sources: list[Source], *, ours: bool) -> Iterator[Subject]:
    """A function that takes tables: first those with an axis of rows, whatever the layout, then those without.

    `[seq, channels]` with an axis put in between fits tokens before heads by broadcasting alone. Hugging Face's
    functions, which have unsqueeze_dim, mean heads before tokens.
    """
    names = ("table",) if "table" in known else ("cos", "sin")
    by_name = roles.by_name(function)
    gathers = "positions" in known and roles.required(function, known["positions"])
    layouts = ("bhsd", "bshd", "sbhd", "thd") if "axis" in known else LAYOUTS
    of_rows = [] if gathers else [(layout, axes) for layout in layouts if layout != "thd" for axes in tables.OF_ROWS]
    for layout, axes in [*of_rows, *((layout, "s") for layout in layouts)]:
        for axis in (1, 2) if "axis" in known else (None,):
            for source in sources:

                def prepared(
                    q: Tensor,
                    k: Tensor | None,
                    positions: Tensor,
                    axes: Any = axes,
                    axis: Any = axis,
                    source: Source = source,
                ) -> Any:
                    rows = torch.arange(int(positions.max()) + 1)[None] if gathers else positions
                    kept = source.make(q, rows)
                    given = _arguments(known, q, k) | ({known["positions"]: positions} if gathers else {})
                    given |= {known[n]: tables.with_axes(t, axes) for n, t in zip(names, kept, strict=True)}
                    return by_name, given | ({} if axis is None else {known["axis"]: axis})

                positions: Positions = "rows" if gathers or axes != "s" else "shared"
                yield Subject(
                    f"{'' if ours else 'tables, then '}{_shape(function, known)}",
                    layout,
                    "k" in known,
                    positions if source.counts else "none",
                    ours,
                    prepared,
                    tables=source.name if ours else f"{source.name}, {axes}, {axis}",
                )


def _our_tables(single: bool) -> list[Source]:
    """Exact ones, in every width. They have the dtype of q, as models give them; angles have not."""
    rope = Rope(GIVEN_CHANNELS, GIVEN_BASE, "half")

    def source(width: tables.Width) -> Source:
        def make(q: Tensor, positions: Tensor) -> Tables:
            at = rope.at(positions, dtype=torch.float64)
            angles = positions[..., None] * torch.from_numpy(rope.inv_freq)
            dtype = torch.float32 if width.startswith("angles") else q.dtype
            kept = tables.written(at.cos, at.sin, angles, width)
            return tuple(t if t.is_complex() else t.to(dtype) for t in kept)

        return Source(width, make, counts=True)

    return [source(width) for width in (tables.SINGLE if single else tables.PAIRED)]


def _made_tables(first: Any) -> list[Source]:
    """Those of a class or function: for x and positions, for a length, for x alone, or for positions alone."""
    if isinstance(first, Built):
        return [Source("rows of a table", lambda q, positions: tuple(t[positions] for t in first.tables), counts=True)]
    known = roles.of_call(first, None)

    def given(q: Tensor) -> dict[str, Any]:
        return {known["x"]: q} if "x" in known else {}

    def at_positions(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**given(q), **{known["positions"]: positions}), positions)

    def of_length(q: Tensor, positions: Tensor) -> Tables:
        made = first(**given(q), **{known["seq_len"]: int(positions.max()) + 1})
        return tuple(t.reshape(-1, t.shape[-1])[positions] for t in _tensors(made))

    def for_x(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**given(q)), positions)

    def x_is_positions(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**{known["x"]: positions}), positions)

    if "positions" in known:
        return [Source("at positions", at_positions, counts=True)]
    if "seq_len" in known:
        return [Source("of a length", of_length, counts=True)]
    if "x" in known:
        return [Source("for x", for_x), Source("for positions", x_is_positions, counts=True)]
    raise _checks.error(
        "check",
        "what makes the tables must take positions or a length",
        f"parameters {_named(first)}",
        "Name the function alone, if it rotates by itself.",
    )


def _tensors(made: Any) -> Tables:
    return (made,) if isinstance(made, Tensor) else tuple(t for t in made if isinstance(t, Tensor))


def _rows(made: Any, positions: Tensor) -> Tables:
    """With an axis of rows: tables without one are shared by all."""
    rows = positions.shape[0]
    kept = tuple(t[None] if t.ndim == 2 else t for t in _tensors(made))
    return tuple(t if t.shape[0] == rows else t.expand(rows, *t.shape[1:]) for t in kept)
