"""List the candidate calls of a target, each as a `Subject`.

A target is passed cos and sin, computes its own angles, or consists of two functions, of which the first computes cos
and sin for the second.
"""

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
GIVEN_CHANNELS, GIVEN_BASE = 16, 100.0  # head_dim and base of the tables that `check` passes to a function

Tables = tuple[Tensor, ...]


class TableSet:
    """Tables for all positions, which a function such as `precompute_freqs_cis` returned."""

    def __init__(self, returned: Any) -> None:
        self.tables = _tensors(returned)


@dataclass(frozen=True)
class Source:
    """A source of tables: cos and sin, or one tensor that contains both.

    Args:
        name: describes the tables, for the report.
        make: a function of q, in the layout of the rotating function, and positions `[batch, seq]`. It returns tables
            with the axes batch and seq.
        takes_positions: whether the source accepts positions. Otherwise, it counts them from 0.
        shared: whether the source accepts only positions `[seq]`, which all rows of the batch share.
    """

    name: str
    make: Callable[[Tensor, Tensor], Tables]
    takes_positions: bool = False
    shared: bool = False


def candidates(first: Any, second: Any, arguments: Arguments | None, call: str | None) -> Iterator[Subject]:
    """Yield every call that the names of the target's parameters allow.

    Args:
        first: the function, object or `TableSet` of the target.
        second: the function that rotates, if `first` computes cos and sin for it. Otherwise None.
        arguments: the arguments with which `first` was constructed, or None.
        call: the roles that the user stated with --call, or None.

    Raises:
        RopeError: the parameters allow no known call. The message says how to describe them.
    """
    if second is not None:
        subjects = _with_tables(second, roles.call_roles(second, call), _table_sources(first), given_tables=False)
    else:
        parameter_of = {} if isinstance(first, TableSet) else roles.call_roles(first, call)
        if {"cos", "sin"} <= {*parameter_of} or "table" in parameter_of:
            subjects = _with_tables(first, parameter_of, _exact_tables("table" in parameter_of), given_tables=True)
        elif {"q", "k"} <= {*parameter_of} or "x" in parameter_of:
            subjects = _with_own_angles(first, parameter_of)
        else:
            raise _checks.error(
                "check",
                "TARGET must have parameters for q and k, or for x",
                f"parameters {_parameter_names(first)}",
                'Describe them with --call "x,positions". If TARGET computes cos and sin for a function, pass both: '
                "file.py:make,apply.",
            )
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in subjects:
        yield replace(subject, module=module, arguments=arguments)


def _parameter_names(function: Any) -> str:
    return (
        "none: it is a set of tables"
        if isinstance(function, TableSet)
        else ", ".join(roles.parameters(function) or {}) or "none"
    )


def _arguments(parameter_of: roles.Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {parameter_of["q"]: q, parameter_of["k"]: k} if "k" in parameter_of else {parameter_of["x"]: q}


def _signature(function: Any, parameter_of: roles.Roles) -> str:
    named = [*(roles.parameters(function) or sorted(parameter_of.values()))]
    return f"f({', '.join(name for name in named if name in parameter_of.values())})"


def _with_own_angles(function: Any, parameter_of: roles.Roles) -> Iterator[Subject]:
    """Yield the calls of a target that computes its own angles."""
    modes: tuple[Positions, ...] = ("none",)
    if "positions" in parameter_of:
        modes = ("rows", "shared")
    elif "offset" in parameter_of:
        modes = ("offset",)
    by_name = roles.accept_keywords(function)
    for mode in modes:
        for layout in LAYOUTS:
            if layout == "thd" and mode == "rows":
                continue

            def prepare(q: Tensor, k: Tensor | None, positions: Tensor, mode: Positions = mode) -> Any:
                keywords = _arguments(parameter_of, q, k)
                if mode == "offset":
                    keywords[parameter_of["offset"]] = int(positions[0, 0])
                elif mode != "none":
                    keywords[parameter_of["positions"]] = positions if mode == "rows" else positions[0]
                return by_name, keywords

            yield Subject(_signature(function, parameter_of), layout, "k" in parameter_of, mode, False, prepare)


def _with_tables(
    function: Any, parameter_of: roles.Roles, sources: list[Source], *, given_tables: bool
) -> Iterator[Subject]:
    """Yield the calls of a function to which tables of cos and sin are passed.

    In all layouts, tables with a batch axis are tried before tables without one, because tables `[seq, channels]` could
    fit a layout with tokens before heads merely by broadcasting. For functions with a parameter
    unsqueeze_dim, as in Hugging Face, the layout bhsd is tried first, since most of them expect heads before tokens.
    """
    names = ("table",) if "table" in parameter_of else ("cos", "sin")
    by_name = roles.accept_keywords(function)
    indexes_tables = "positions" in parameter_of and roles.is_required(function, parameter_of["positions"])
    layouts = ("bhsd", "bshd", "sbhd", "thd") if "axis" in parameter_of else LAYOUTS
    with_batch_axis = (
        [] if indexes_tables else [(layout, axes) for layout in layouts if layout != "thd" for axes in tables.BATCHED]
    )
    for layout, axes in [*with_batch_axis, *((layout, "s") for layout in layouts)]:
        for axis in (1, 2) if "axis" in parameter_of else (None,):
            for source in sources:

                def prepare(
                    q: Tensor,
                    k: Tensor | None,
                    positions: Tensor,
                    axes: Any = axes,
                    axis: Any = axis,
                    source: Source = source,
                ) -> Any:
                    rows = torch.arange(int(positions.max()) + 1)[None] if indexes_tables else positions
                    tables_of_q = source.make(q, rows)
                    keywords = _arguments(parameter_of, q, k) | (
                        {parameter_of["positions"]: positions} if indexes_tables else {}
                    )
                    keywords |= {
                        parameter_of[n]: tables.with_axes(t, axes) for n, t in zip(names, tables_of_q, strict=True)
                    }
                    return by_name, keywords | ({} if axis is None else {parameter_of["axis"]: axis})

                by_row = (indexes_tables or axes != "s") and not source.shared
                positions: Positions = "rows" if by_row else "shared"
                yield Subject(
                    f"{'' if given_tables else 'tables, then '}{_signature(function, parameter_of)}",
                    layout,
                    "k" in parameter_of,
                    positions if source.takes_positions else "none",
                    given_tables,
                    prepare,
                    tables=source.name if given_tables else f"{source.name}, {axes}, {axis}",
                )


def _exact_tables(single: bool) -> list[Source]:
    """Return sources of exact tables in every format.

    As in models, cos and sin have the dtype of q, and tables of angles are float32.
    """
    rope = Rope(GIVEN_CHANNELS, GIVEN_BASE, "half")

    def source(width: tables.Width) -> Source:
        def make(q: Tensor, positions: Tensor) -> Tables:
            rotation = rope.at(positions, dtype=torch.float64)
            angles = positions[..., None] * torch.from_numpy(rope.inv_freq)
            dtype = torch.float32 if width.startswith("angles") else q.dtype
            formatted = tables.format_tables(rotation.cos, rotation.sin, angles, width)
            return tuple(t if t.is_complex() else t.to(dtype) for t in formatted)

        return Source(width, make, takes_positions=True)

    return [source(width) for width in (tables.SINGLE if single else tables.PAIRED)]


def _table_sources(first: Any) -> list[Source]:
    """Return the sources of tables that a class or function offers.

    The parameters of the class or function may be positions (and x), a length (and x), or only x. In the last case, the
    positions may also be passed as x.
    """
    if isinstance(first, TableSet):
        return [
            Source(
                "rows of a table", lambda q, positions: tuple(t[positions] for t in first.tables), takes_positions=True
            )
        ]
    parameter_of = roles.call_roles(first, None)

    def keywords(q: Tensor) -> dict[str, Any]:
        return {parameter_of["x"]: q} if "x" in parameter_of else {}

    def at_positions(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**keywords(q), **{parameter_of["positions"]: positions}), positions)

    def at_shared_positions(q: Tensor, positions: Tensor) -> Tables:
        returned = _tensors(first(**keywords(q), **{parameter_of["positions"]: positions[0]}))
        return _rows(tuple(t.reshape(-1, t.shape[-1]) for t in returned), positions)

    def for_length(q: Tensor, positions: Tensor) -> Tables:
        returned = first(**keywords(q), **{parameter_of["seq_len"]: int(positions.max()) + 1})
        return tuple(t.reshape(-1, t.shape[-1])[positions] for t in _tensors(returned))

    def for_x(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**keywords(q)), positions)

    def x_is_positions(q: Tensor, positions: Tensor) -> Tables:
        return _rows(first(**{parameter_of["x"]: positions}), positions)

    if "positions" in parameter_of:
        return [
            Source("at positions", at_positions, takes_positions=True),
            Source("at shared positions", at_shared_positions, takes_positions=True, shared=True),
        ]
    if "seq_len" in parameter_of:
        return [Source("of a length", for_length, takes_positions=True)]
    if "x" in parameter_of:
        return [Source("for x", for_x), Source("for positions", x_is_positions, takes_positions=True)]
    raise _checks.error(
        "check",
        "the function that computes the tables must have a parameter for positions, a length or x",
        f"parameters {_parameter_names(first)}",
        "If the second function computes its own angles, pass it alone.",
    )


def _tensors(returned: Any) -> Tables:
    return (returned,) if isinstance(returned, Tensor) else tuple(t for t in returned if isinstance(t, Tensor))


def _rows(returned: Any, positions: Tensor) -> Tables:
    """Add a batch axis to tables without one, and expand it to the number of sequences, which then share the tables."""
    rows = positions.shape[0]
    formatted = tuple(t[None] if t.ndim == 2 else t for t in _tensors(returned))
    return tuple(t if t.shape[0] == rows else t.expand(rows, *t.shape[1:]) for t in formatted)
