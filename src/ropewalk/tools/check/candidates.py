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
from ropewalk.tools.check import roles, tables
from ropewalk.tools.check.construct import Arguments
from ropewalk.tools.check.subject import LAYOUTS, Positions, Subject

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
        positions: the positions that the source accepts. With "none", it counts them from 0.
    """

    name: str
    make: Callable[[Tensor, Tensor], Tables]
    positions: Positions = "rows"


def candidates(
    first: Any, second: Any, arguments: Arguments | None, call: str | None, channels: int
) -> Iterator[Subject]:
    """Yield every call that the names of the target's parameters allow.

    Args:
        first: the function, object or `TableSet` of the target.
        second: the function that rotates, if `first` computes cos and sin for it. Otherwise None.
        arguments: the arguments with which `first` was constructed, or None.
        call: the roles that the user stated as `call`, or None.
        channels: the number of channels of a head of the target.

    Raises:
        RopeError: the parameters allow no known call. The message says how to describe them.
    """
    layer_type = None if arguments is None else arguments.layer_type
    if second is not None:
        subjects = _with_tables(second, roles.call_roles(second, call), _table_sources(first, layer_type), False)
    else:
        parameter_of = {} if isinstance(first, TableSet) else roles.call_roles(first, call)
        if {"cos", "sin"} <= {*parameter_of} or "table" in parameter_of:
            subjects = _with_tables(first, parameter_of, _exact_tables("table" in parameter_of), True)
            channels = GIVEN_CHANNELS
        elif {"q", "k"} <= {*parameter_of} or "x" in parameter_of:
            subjects = _with_own_angles(first, parameter_of, _fixed(parameter_of, layer_type))
        else:
            how = _checks.argument("call", "x,positions")
            fix = f"Pass {how}. If TARGET computes cos and sin for a function, pass both: "
            must = "TARGET must have parameters for q and k, or for x"
            raise _checks.error("check", must, _parameters(first), f"{fix}file.py:make,apply.")
    module = next((m for m in (first, getattr(first, "__self__", None)) if isinstance(m, torch.nn.Module)), None)
    for subject in subjects:
        yield replace(subject, module=module, arguments=arguments, channels=channels)


def _parameters(function: Any) -> str:
    known = None if isinstance(function, TableSet) else roles.parameters(function)
    return f"parameters {', '.join(known or {}) or 'none'}"


def _fixed(parameter_of: roles.Roles, layer_type: str | None) -> dict[str, Any]:
    """Return the argument that states the kind of the expected layer, if the function has a parameter for it."""
    known = layer_type is not None and "layer_type" in parameter_of
    return {parameter_of["layer_type"]: layer_type} if known else {}


def _arguments(parameter_of: roles.Roles, q: Tensor, k: Tensor | None) -> dict[str, Any]:
    return {parameter_of["q"]: q, parameter_of["k"]: k} if "k" in parameter_of else {parameter_of["x"]: q}


def _signature(function: Any, parameter_of: roles.Roles) -> str:
    named = [*(roles.parameters(function) or sorted(parameter_of.values()))]
    return f"f({', '.join(name for name in named if name in parameter_of.values())})"


def _with_own_angles(function: Any, parameter_of: roles.Roles, fixed: dict[str, Any]) -> Iterator[Subject]:
    """Yield the calls of a target that computes its own angles. All of them pass the arguments in `fixed`."""
    modes: tuple[Positions, ...] = ("none",)
    if "positions" in parameter_of:
        modes = ("rows", "shared")
    elif "offset" in parameter_of:
        modes = ("offset",)
    by_name = roles.accept_keywords(function)
    for mode in modes:
        for layout in LAYOUTS:
            if mode == "rows" and "b" not in layout:
                continue

            def prepare(q: Tensor, k: Tensor | None, positions: Tensor, mode: Positions = mode) -> Any:
                keywords = _arguments(parameter_of, q, k) | fixed
                if mode == "offset":
                    keywords[parameter_of["offset"]] = int(positions[0, 0])
                elif mode != "none":
                    keywords[parameter_of["positions"]] = positions if mode == "rows" else positions[0]
                return by_name, keywords

            yield Subject(_signature(function, parameter_of), layout, "k" in parameter_of, mode, False, prepare)


def _with_tables(
    function: Any, parameter_of: roles.Roles, sources: list[Source], given_tables: bool
) -> Iterator[Subject]:
    """Yield the calls of a function to which tables of cos and sin are passed.

    In all layouts, tables with a batch axis are tried before tables without one, because tables `[seq, channels]` could
    fit a layout with tokens before heads merely by broadcasting. For functions with a parameter
    unsqueeze_dim, as in Hugging Face, the layout bhsd is tried first, since most of them expect heads before tokens.
    """
    names = [parameter_of[role] for role in (("table",) if "table" in parameter_of else ("cos", "sin"))]
    by_name = roles.accept_keywords(function)
    index = (roles.parameters(function) or {}).get(parameter_of.get("positions", ""))
    indexes_tables = index is not None and index.default is index.empty
    layouts = ("bhsd", *(n for n in LAYOUTS if n != "bhsd")) if "axis" in parameter_of else LAYOUTS
    with_batch_axis = (
        [] if indexes_tables else [(layout, axes) for layout in layouts if "b" in layout for axes in tables.BATCHED]
    )
    for layout, axes in [*with_batch_axis, *((layout, "s") for layout in layouts)]:
        for axis in (1, 2) if "axis" in parameter_of else (None,):
            for source in sources:

                def prepare(
                    q: Tensor,
                    k: Tensor | None,
                    positions: Tensor,
                    axes: str = axes,
                    axis: int | None = axis,
                    source: Source = source,
                ) -> Any:
                    rows = torch.arange(int(positions.max()) + 1)[None] if indexes_tables else positions
                    values: list[Any] = [tables.with_axes(t, axes) for t in source.make(q, rows)]
                    if len(names) == 1 < len(values):
                        values = [tuple(values)]
                    if len(names) != len(values):
                        raise ValueError(f"{len(values)} tensor(s) are computed for the parameters {', '.join(names)}")
                    keywords = _arguments(parameter_of, q, k) | dict(zip(names, values, strict=True))
                    if indexes_tables:
                        keywords[parameter_of["positions"]] = positions
                    if axis is not None:
                        keywords[parameter_of["axis"]] = axis
                    return by_name, keywords

                by_row = indexes_tables or axes != "s"
                yield Subject(
                    f"{'' if given_tables else 'tables, then '}{_signature(function, parameter_of)}",
                    layout,
                    "k" in parameter_of,
                    "shared" if source.positions == "rows" and not by_row else source.positions,
                    given_tables,
                    prepare,
                    tables=source.name if given_tables else f"{source.name}, {axes}, {axis}",
                )


def _exact_tables(single: bool) -> list[Source]:
    """Return sources of exact tables in every format.

    As in models, cos and sin have the dtype of q, and tables of angles are float32.
    """
    rope = Rope(GIVEN_CHANNELS, GIVEN_BASE, "half")

    def source(width: str) -> Source:
        def make(q: Tensor, positions: Tensor) -> Tables:
            rotation = rope.at(positions, dtype=torch.float64)
            angles = positions[..., None] * torch.from_numpy(rope.inv_freq)
            dtype = torch.float32 if width.startswith("angles") else q.dtype
            formatted = tables.format_tables(rotation.cos, rotation.sin, angles, width)
            return tuple(t if t.is_complex() else t.to(dtype) for t in formatted)

        return Source(width, make)

    return [source(width) for width in (tables.SINGLE if single else tables.COLUMNS)]


def _table_sources(first: Any, layer_type: str | None) -> list[Source]:
    """Return the sources of tables that a class or function offers.

    The parameters of the class or function may be positions (and x), a length (and x), or only x. In the last case, the
    positions may also be passed as x.
    """
    if isinstance(first, TableSet):
        return [Source("rows of a table", lambda q, positions: tuple(t[positions] for t in first.tables))]
    parameter_of = roles.call_roles(first, None)
    fixed = _fixed(parameter_of, layer_type)

    def make(q: Tensor, **values: Any) -> Any:
        named = {parameter_of[role]: value for role, value in values.items()}
        return first(**({parameter_of["x"]: q} if "x" in parameter_of else {}) | fixed | named)

    def flat(returned: Any) -> Tables:
        return tuple(t.reshape(-1, t.shape[-1]) for t in _tensors(returned))

    if "positions" in parameter_of:
        return [
            Source("at positions", lambda q, p: _rows(make(q, positions=p), p)),
            Source("at shared positions", lambda q, p: _rows(flat(make(q, positions=p[0])), p), "shared"),
        ]
    if "seq_len" in parameter_of:
        return [Source("of a length", lambda q, p: tuple(t[p] for t in flat(make(q, seq_len=int(p.max()) + 1))))]
    if "x" in parameter_of:
        for_positions = Source("for positions", lambda q, p: _rows(make(q, x=p), p))
        return [Source("for x", lambda q, p: _rows(make(q), p), "none"), for_positions]
    raise _checks.error(
        "check",
        "the function that computes the tables must have a parameter for positions, a length or x",
        _parameters(first),
        "If the second function computes its own angles, pass it alone.",
    )


def _tensors(returned: Any) -> Tables:
    return (returned,) if isinstance(returned, Tensor) else tuple(t for t in returned if isinstance(t, Tensor))


def _rows(returned: Any, positions: Tensor) -> Tables:
    """Add a batch axis to tables without one, and expand it to the number of sequences, which then share the tables."""
    rows = positions.shape[0]
    formatted = tuple(t[None] if t.ndim == 2 else t for t in _tensors(returned))
    return tuple(t if t.shape[0] == rows else t.expand(rows, *t.shape[1:]) for t in formatted)
