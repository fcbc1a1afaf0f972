"""The ways to pass positions of several axes, which the rest of `check` has as `[axes, batch, seq]`.

A target takes them as one tensor, as one parameter for each axis, or as the size of a grid, of which it rotates all
cells in the order of rows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.tools.check.find import signature
from ropewalk.tools.check.find.signature import Roles
from ropewalk.tools.check.find.subject import LAYOUTS, CallError, Subject

COUNTS = (3, 2, 4)
"""The numbers of axes that are tried if nothing states it."""

_SIDES = {2: 128, 3: 64, 4: 16}  # number of axes → rows and columns of the largest square grid that is tried
_NAMES = ("frames", "height", "width")  # roles
_SECTIONS = signature.CALL_NAMES["sections"].split()


@dataclass(frozen=True)
class Adapted:
    """A target with one parameter for its positions, instead of those that it has.

    Args:
        first, second: the objects of the target. The one that takes positions gets them as `[axes, batch, seq]`, or as
            `[batch, seq]` if they are equal on all axes; without the axis of the batch if all rows share them.
        call: the description of the call.
        layout: the only layout for which this is meant, or None.
        side: the side of the largest square grid that is tried, or None if positions are passed.
        sizes: the number of pairs of each axis in the tables that `check` passes, or None if it passes none.
    """

    first: Any
    second: Any
    call: str | None
    layout: str | None = None
    side: int | None = None
    sizes: list[int] | None = None


@dataclass(frozen=True)
class _Way:
    """A way to pass positions.

    Args:
        by_row: whether rows of the batch may have different positions.
        arguments: a function of positions `[axes, batch, seq]`, which returns the arguments by name.
        is_grid: whether the size of a grid is passed instead of positions.
    """

    by_row: bool
    arguments: Callable[[Tensor], dict[str, Any]]
    is_grid: bool = False


def read_form(call: str | None) -> tuple[str | None, str | None]:
    """Split the axes of the positions from a description of a call: "x,positions:3bs" is "x,positions" and "3bs"."""
    form = re.search(r"(?<=\w):\s*(\w+)", call or "")
    if form is None or call is None:
        return call, None
    if re.sub(r"[2-9]", "a", "".join(sorted(form[1]))) not in ("as", "abs"):
        must = "the axes of positions must be s, a digit for the number of axes, and possibly b"
        raise _checks.error("check", must, _checks.shown(form[1]), "Pass a call such as x,positions:3bs.")
    return call.replace(form[0], ""), form[1]


def count_of(form: str) -> int:
    """Return the number of axes in "3bs"."""
    return int(re.sub(r"\D", "", form))


def adapted(
    first: Any,
    second: Any,
    call: str | None,
    form: str | None,
    count: int,
    sizes: list[int],
    stated: Mapping[str, Any],
) -> Iterator[Adapted]:
    """Yield the target with each way to pass positions of `count` axes, the most usual first.

    Args:
        first: the function or object that takes positions, or the tables of all cells of a grid.
        second: the function that takes tables, or None.
        call: the description of the call of the last of them, or None.
        form: the axes of the tensor of positions, such as "3bs", or None if all are tried.
        count: the number of axes.
        sizes: the number of pairs of each axis, for functions with a parameter for it.
        stated: the values that the user states for parameters of the function.
    """
    if second is not None:
        second, call = _with_sections(second, call, sizes, stated)
    if isinstance(first, tuple):
        grid = getattr(first, "grid", ())
        if len(grid) == count:

            def rows(positions: Tensor) -> tuple[Tensor, ...]:
                return _rows_of_grid(first, _with_all_axes(positions, count, True), grid)

            yield Adapted(rows, second, call, side=min(grid))
        return
    tables = second is not None
    described = signature.read_call(first, None if tables else call, stated)
    parameter_of = described.parameter_of
    given = None
    if not tables and {"cos", "table", "cos_sin_cache"} & {*parameter_of}:
        literals = [described.literals[n] for n in _SECTIONS if n in described.literals]
        if "sections" not in parameter_of and not literals:
            return
        given = sizes = [*literals[0]] if literals else sizes
        if "cos_sin_cache" not in parameter_of:
            first, call = _with_sections(first, call, sizes, stated, tables_of_one_axis=True)
            yield Adapted(first, None, call, sizes=given)
            return
    for way in _ways(parameter_of, count, form):
        for layout in LAYOUTS if way.is_grid and not tables else (None,):
            fixed = {parameter_of["sections"]: sizes} if "sections" in parameter_of else {}
            function = _with_positions(first, parameter_of, way, fixed, count, layout)
            words = call if tables else _renamed(call, parameter_of)
            yield Adapted(function, second, words, layout, _SIDES[count] if way.is_grid else None, given)


def _renamed(call: str | None, parameter_of: Roles) -> str | None:
    """Return the description of a call with the parameter `positions` instead of those of the axes."""
    if call is None:
        return None
    roles, arrow, results = call.partition("->")
    words = [word for word in roles.split(",") if word.strip() not in (*_NAMES, "grid", "sections")]
    return ",".join([*words, *([] if "positions" in parameter_of else ["positions"])]) + arrow + results


def _with_positions(
    function: Any, parameter_of: Roles, way: _Way, fixed: dict[str, Any], count: int, layout: str | None
) -> Callable[..., Any]:
    """Return a function that takes positions and passes them in this way."""
    by_name = signature.accept_keywords(function)
    replaced = ("sections",) if "positions" in parameter_of else (*_NAMES, "grid", "sections")
    dropped = {parameter_of[role] for role in replaced if role in parameter_of}
    named = signature.parameters(function) or dict.fromkeys(sorted(parameter_of.values()))
    kept = {name.replace(" ", "_"): name for name in named if name not in dropped}  # parameters may have no name
    name = parameter_of.get("positions", "positions")

    def adapter(**keywords: Any) -> Any:
        keywords = {kept.get(name, name): value for name, value in keywords.items()}
        positions = _with_all_axes(keywords.pop(name), count, way.by_row)
        passed = keywords | fixed | way.arguments(positions)
        if layout is not None:
            tokens = layout.index("t" if layout == "thd" else "s")
            inputs = [parameter_of[role] for role in ("q", "k", "x") if parameter_of.get(role) in passed]
            return _call_on_grid(by_name, passed, inputs, positions, tokens)
        returned = by_name(**passed)
        if way.is_grid:
            tables = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            return _rows_of_grid(tables, positions, _grid_of(positions))
        return returned

    return _named(adapter, function, [*dict.fromkeys([*kept, name.replace(" ", "_")])])


def _with_sections(
    function: Any, call: str | None, sizes: list[int], stated: Mapping[str, Any], *, tables_of_one_axis: bool = False
) -> tuple[Any, str | None]:
    """Return a function of tables that needs no sections, and the description of its call.

    With `tables_of_one_axis`, it takes tables without an axis for the axes, too, if these are equal.
    """
    parameter_of = signature.read_call(function, call, stated).parameter_of
    if "sections" not in parameter_of and not tables_of_one_axis:
        return function, call
    by_name, name = signature.accept_keywords(function), parameter_of.get("sections")
    fixed = {} if name is None else {name: [*sizes]}
    of_tables = {parameter_of[role] for role in ("cos", "sin", "table") if role in parameter_of}

    def adapter(**keywords: Any) -> Any:
        tables = {n: t for n, t in keywords.items() if n in of_tables and t.ndim == 3}
        return by_name(**keywords | {n: t.expand(len(sizes), *t.shape) for n, t in tables.items()} | fixed)

    kept = [n for n in signature.parameters(function) or {} if n != name]
    return _named(adapter, function, kept), _renamed(call, {"positions": ""})


def _named(adapter: Any, function: Any, names: list[str]) -> Callable[..., Any]:
    """Give an adapter these parameters, with the defaults that they have in the function."""
    known = signature.parameters(function) or {}
    keyword_only, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    defaults = {name: known[name].default if name in known else empty for name in names}
    adapter.__signature__ = inspect.Signature(
        [inspect.Parameter(name, keyword_only, default=default) for name, default in defaults.items()]
    )
    adapter.__self__ = getattr(function, "__self__", function)  # the module that `check` casts and loads
    named: Callable[..., Any] = adapter
    return named


def _with_all_axes(positions: Tensor, count: int, by_row: bool) -> Tensor:
    """Return positions `[axes, batch, seq]` of a call in which rows have their own, or all share them.

    Raises:
        ValueError: the call is of the other kind.
    """
    if positions.ndim == (2 if by_row else 1):
        positions = positions.expand(count, *positions.shape)
    if positions.ndim != (3 if by_row else 2) or len(positions) != count:
        raise ValueError("these positions are meant for another call")
    return positions if by_row else positions[:, None]


def _ways(parameter_of: Roles, count: int, form: str | None) -> list[_Way]:
    if "positions" in parameter_of:
        name = parameter_of["positions"]
        forms = [form] if form else [f"{count}bs", f"bs{count}", f"{count}s", f"s{count}"]
        return [_Way("b" in f, _tensor(name, f)) for f in forms]
    roles = [role for role in _NAMES if role in parameter_of]
    names = [parameter_of[role] for role in roles]
    if roles[-2:] == ["height", "width"] and len(roles) == count:
        return [
            _Way(True, lambda p: dict(zip(names, p.contiguous(), strict=True))),
            _Way(False, lambda p: dict(zip(names, p[:, 0].contiguous(), strict=True))),
            _Way(False, lambda p: dict(zip(names, _grid_of(p), strict=True)), is_grid=True),
        ]
    if "grid" in parameter_of:
        name = parameter_of["grid"]
        return [
            _Way(False, lambda p: {name: _grid_of(p)}, is_grid=True),
            _Way(False, lambda p: {name: torch.tensor([_grid_of(p)])}, is_grid=True),
        ]
    return []


def _tensor(name: str, form: str) -> Callable[[Tensor], dict[str, Any]]:
    letters = re.sub(r"\d", "a", form)

    def arguments(positions: Tensor) -> dict[str, Any]:
        chosen, axes = (positions, "abs") if "b" in letters else (positions[:, 0], "as")
        return {name: chosen.permute([axes.index(letter) for letter in letters]).contiguous()}

    return arguments


def _grid_of(positions: Tensor) -> tuple[int, ...]:
    """Return the size of the smallest grid that contains all positions `[axes, batch, seq]`."""
    return tuple(int(p.max()) + 1 for p in positions)


def _cells_of(positions: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the index of each token `[batch, seq]` among the cells of a grid, which are in the order of rows."""
    cells = torch.zeros_like(positions[0])
    for axis, size in zip(positions, grid, strict=True):
        cells = cells * size + axis
    return cells


def sides(parameter_of: Roles) -> dict[str, int]:
    """Return a size for each side of a grid, if a function that computes all tables has parameters for them."""
    roles = [role for role in _NAMES if role in parameter_of]
    return {parameter_of[role]: _SIDES[len(roles)] for role in roles} if roles[-2:] == ["height", "width"] else {}


def _rows_of_grid(tables: Any, positions: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the rows `[batch, seq, columns]` at positions `[axes, batch, seq]` of tables of all cells of a grid.

    Raises:
        IndexError: a position is outside the grid.
    """
    if bool((positions.amax((1, 2)) >= torch.tensor(grid)).any()):
        raise IndexError(f"a position is outside of a grid of {' × '.join(map(str, grid))} cells")
    cells = _cells_of(positions, grid)
    count = int(torch.tensor(grid).prod())
    return tuple(t.reshape(count, -1)[cells] for t in tables if isinstance(t, Tensor))


def all_matter(subject: Subject) -> bool:
    """Return whether every axis changes the result."""
    x = torch.sin(1 + torch.arange(subject.channels, dtype=torch.float32)).expand(1, 2, 1, -1)
    at_0 = torch.zeros(subject.axes or 0, 1, 2, dtype=torch.int64)
    for axis in range(len(at_0)):
        positions = at_0.clone()
        positions[axis] = 1
        try:
            if torch.equal(subject(x, x, positions)[0], subject(x, x, at_0)[0]):
                return False
        except CallError:
            return False
    return True


def _call_on_grid(
    function: Callable[..., Any], keywords: dict[str, Any], names: list[str], positions: Tensor, axis: int
) -> Any:
    """Rotate tokens at any positions with a function that rotates all cells of a grid.

    Args:
        function: the function.
        keywords: its arguments.
        names: its parameters for q and k.
        positions: `[axes, 1, seq]`.
        axis: the axis of the tokens in q and k.
    """
    grid = _grid_of(positions)
    if (count := int(torch.tensor(grid).prod())) > _SIDES[len(grid)] ** len(grid):
        raise ValueError(f"check tries no grid of {' × '.join(map(str, grid))} cells")
    cells = _cells_of(positions, grid)[0]
    earlier = torch.tril(cells[:, None] == cells, diagonal=-1).sum(1)  # tokens in the same cell before each token
    results: list[Tensor] = []
    for call in range(int(earlier.max()) + 1):
        here = (earlier == call).nonzero().flatten()
        whole = {}
        for name in names:
            x = keywords[name]
            empty = x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :])
            whole[name] = empty.index_copy(axis, cells[here], x.index_select(axis, here))
        passed = {name: x.detach().clone() for name, x in whole.items()}
        returned = function(**keywords | whole)
        for name, x in whole.items():
            if not torch.equal(x.detach(), passed[name]):  # as the target would do with the tokens themselves
                with torch.no_grad():
                    keywords[name].index_copy_(axis, here, x.index_select(axis, cells[here]))
        outs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        results = results or [o.new_zeros(*o.shape[:axis], len(cells), *o.shape[axis + 1 :]) for o in outs]
        pairs = zip(results, outs, strict=True)
        results = [r.index_copy(axis, here, o.index_select(axis, cells[here])) for r, o in pairs]
    return results[0] if len(results) == 1 else tuple(results)
