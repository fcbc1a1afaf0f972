"""List the common ways to call a rotation, each as a `Subject`: with tables, with its own angles, or in two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks
from ropewalk._layout import Layout
from ropewalk.conformance import roles, tables
from ropewalk.conformance.construct import Arguments
from ropewalk.conformance.subject import Positions, Subject

LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd", "sbhd", "thd")
GIVEN_CHANNELS, GIVEN_BASE = 16, 100.0  # of the tables that are passed to a function

Tables = tuple[Tensor, ...]


class Built:
    """Tables for all positions, computed once by a function such as `precompute_freqs_cis`."""

    def __init__(self, returned: Any) -> None:
        self.tables = _tensors(returned)


@dataclass(frozen=True)
class Source:
    """A source of tables.

    Args:
        name: the name of the kind of tables.
        make: q in the layout of the function and positions `[batch, seq]` → tables with axes batch and seq.
        counts: whether positions can be passed. Otherwise, they are counted from 0.
    """

    name: str
    make: Callable[[Tensor, Tensor], Tables]
    counts: bool = False


def candidates(first: Any, second: Any, arguments: Arguments | None, call: str | None) -> Iterator[Subject]:
    """Yield every way to call the target that its parameters allow.

    Raises:
        RopeError: the parameters allow no known way. The message says how to describe them.
    """
    if second is not None:
        ways = _with_tables(second, roles.call_roles(second, call), _tables_of(first), given_tables=False)
    else:
        known = {} if isinstance(first, Built) else roles.call_roles(first, call)
        if {"cos", "sin"} <= {*known} or "table" in known:
            ways = _with_tables(first, known, _exact_tables("table" in known), given_tables=True)
        elif {"q", "k"} <= {*known} or "x" in known:
            ways = _with_own_angles(first, known)
        else:
            raise _checks.error(
                "check",
                "TARGET must take q and k, or x",
                f"parameters {_parameter_names(first)}",
                'Describe them: --call "x,positions". If it makes tables, add the function: file.py:make,apply.',
            )
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in ways:
        yield replace(subject, module=module, arguments=arguments)


def _parameter_names(function: Any) -> str:
    return "that are tables" if isinstance(function, Built) else ", ".join(roles.parameters(function) or {}) or "none"


def _arguments(known: roles.Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {known["q"]: q, known["k"]: k} if "k" in known else {known["x"]: q}


def _signature(function: Any, known: roles.Roles) -> str:
    named = [*(roles.parameters(function) or sorted(known.values()))]
    return f"f({', '.join(name for name in named if name in known.values())})"


def _with_own_angles(function: Any, known: roles.Roles) -> Iterator[Subject]:
    """A target that computes its own angles."""
    modes: tuple[Positions, ...] = ("none",)
    if "positions" in known:
        modes = ("rows", "shared")
    elif "offset" in known:
        modes = ("offset",)
    by_name = roles.accept_keywords(function)
    for mode in modes:
        for layout in LAYOUTS:
            if layout == "thd" and mode == "rows":
                continue

            def prepare(q: Tensor, k: Tensor | None, positions: Tensor, mode: Positions = mode) -> Any:
                keywords = _arguments(known, q, k)
                if mode == "offset":
                    keywords[known["offset"]] = int(positions[0, 0])
                elif mode != "none":
                    keywords[known["positions"]] = positions if mode == "rows" else positions[0]
                return by_name, keywords

            yield Subject(_signature(function, known), layout, "k" in known, mode, False, prepare)


def _with_tables(function: Any, known: roles.Roles, sources: list[Source], *, given_tables: bool) -> Iterator[Subject]:
    """A function that takes tables. Tables with an axis of rows are tried before tables without one, in all layouts.

    Tables `[seq, channels]` with an inserted axis can fit a layout with tokens before heads merely by broadcasting.
    Functions with a parameter unsqueeze_dim, as in Hugging Face, expect heads before tokens.
    """
    names = ("table",) if "table" in known else ("cos", "sin")
    by_name = roles.accept_keywords(function)
    gathers = "positions" in known and roles.required(function, known["positions"])
    layouts = ("bhsd", "bshd", "sbhd", "thd") if "axis" in known else LAYOUTS
    of_rows = [] if gathers else [(layout, axes) for layout in layouts if layout != "thd" for axes in tables.OF_ROWS]
    for layout, axes in [*of_rows, *((layout, "s") for layout in layouts)]:
        for axis in (1, 2) if "axis" in known else (None,):
            for source in sources:

                def prepare(
                    q: Tensor,
                    k: Tensor | None,
                    positions: Tensor,
                    axes: Any = axes,
                    axis: Any = axis,
                    source: Source = source,
                ) -> Any:
                    rows = torch.arange(int(positions.max()) + 1)[None] if gathers else positions
                    written = source.make(q, rows)
                    keywords = _arguments(known, q, k) | ({known["positions"]: positions} if gathers else {})
                    keywords |= {known[n]: tables.with_axes(t, axes) for n, t in zip(names, written, strict=True)}
                    return by_name, keywords | ({} if axis is None else {known["axis"]: axis})

                positions: Positions = "rows" if gathers or axes != "s" else "shared"
                yield Subject(
                    f"{'' if given_tables else 'tables, then '}{_signature(function, known)}",
                    layout,
                    "k" in known,
                    positions if source.counts else "none",
                    given_tables,
                    prepare,
                    tables=source.name if given_tables else f"{source.name}, {axes}, {axis}",
                )


def _exact_tables(single: bool) -> list[Source]:
    """Exact tables in every form. They have the dtype of q, as in models; tables of angles are float32."""
    rope = Rope(GIVEN_CHANNELS, GIVEN_BASE, "half")

    def source(width: tables.Width) -> Source:
        def make(q: Tensor, positions: Tensor) -> Tables:
            at = rope.at(positions, dtype=torch.float64)
            angles = positions[..., None] * torch.from_numpy(rope.inv_freq)
            dtype = torch.float32 if width.startswith("angles") else q.dtype
            written = tables.write(at.cos, at.sin, angles, width)
            return tuple(t if t.is_complex() else t.to(dtype) for t in written)

        return Source(width, make, counts=True)

    return [source(width) for width in (tables.SINGLE if single else tables.PAIRED)]


def _tables_of(first: Any) -> list[Source]:
    """The tables that a class or function makes: for x and positions, for a length, for x, or for positions."""
    if isinstance(first, Built):
        return [Source("rows of a table", lambda q, positions: tuple(t[positions] for t in first.tables), counts=True)]
    known = roles.call_roles(first, None)

    def keywords(q: Tensor) -> dict[str, Any]:
        return {known["x"]: q} if "x" in known else {}

    def at_positions(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**keywords(q), **{known["positions"]: positions}), positions)

    def of_length(q: Tensor, positions: Tensor) -> Tables:
        returned = first(**keywords(q), **{known["seq_len"]: int(positions.max()) + 1})
        return tuple(t.reshape(-1, t.shape[-1])[positions] for t in _tensors(returned))

    def for_x(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**keywords(q)), positions)

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
        f"parameters {_parameter_names(first)}",
        "Pass only the function, if it computes its own angles.",
    )


def _tensors(returned: Any) -> Tables:
    return (returned,) if isinstance(returned, Tensor) else tuple(t for t in returned if isinstance(t, Tensor))


def _rows(returned: Any, positions: Tensor) -> Tables:
    """Add an axis of rows to tables without one: all rows share them."""
    rows = positions.shape[0]
    written = tuple(t[None] if t.ndim == 2 else t for t in _tensors(returned))
    return tuple(t if t.shape[0] == rows else t.expand(rows, *t.shape[1:]) for t in written)
