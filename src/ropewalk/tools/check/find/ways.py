"""The ways to pass positions: for each token, as an offset, as the ends of documents, or on several axes.

Positions on several axes are `[axes, batch, seq]`. A target takes them as one tensor, as one parameter for each axis,
or as the size of a grid, of which it rotates all cells in the order of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope, _checks
from ropewalk.tools.check.find.form import ONE_ROW
from ropewalk.tools.check.find.signature import Call, Roles, accept_keywords

COUNTS = (3, 2, 4)
"""The numbers of axes that are tried if nothing states it."""

_SIDES = {2: 128, 3: 64, 4: 16}  # number of axes → rows and columns of the largest square grid that is tried
_AXES = ("frames", "height", "width")  # roles

# Which positions are passed → the roles of the parameters that state them.
_ROLES = {
    "rows": ("positions",),
    "shared": ("positions",),
    "offset": ("offset", "offsets"),
    "offsets": ("offset", "offsets"),
    "packed": ("cu_seqlens", "max_seqlen"),
    "runs": ("cu_seqlens", "max_seqlen", "offset", "offsets"),
}
OF_POSITIONS = frozenset(role for roles in _ROLES.values() for role in roles)


@dataclass(frozen=True)
class Way:
    """A way to pass positions, and tables if the target takes them.

    Args:
        positions: which positions the target accepts. "rows" is a separate list for each row of the batch, and "shared"
            one list for the whole batch. With "offset", the target accepts the position of the first token and counts
            from there, with "offsets" from one position for each row. With "none", it counts from 0. With "packed", one
            row contains several documents, and the target counts from 0 in each, with "runs" from one position for each
            document. Before the tables are known, "given" means that they have a row for each token.
        roles: the roles of the parameters that state the positions.
        arguments: returns the arguments by name, for positions `[batch, seq]` or `[axes, batch, seq]`, and for q in the
            target's layout.
        side: the rows and columns of the largest square grid that is passed instead of positions, or None.
        given: the rope of the tables that `check` passes, with which the target computes no angles. None if it passes
            none.
        tables: the format of cos and sin that the target accepts or computes, or None.
    """

    positions: str
    roles: tuple[str, ...]
    arguments: Callable[[Tensor, Tensor], dict[str, Any]]
    side: int | None = None
    given: Rope | None = None
    tables: str | None = None

    def fitting(self, layouts: Sequence[str]) -> list[str]:
        """Return the layouts of a target to which positions can be passed in this way, the most likely first."""
        if self.positions in ("packed", "runs"):  # all documents are in one row, in thd mostly without an axis for it
            return sorted((name for name in layouts if name in ("thd", "bshd")), reverse=True)
        return [name for name in layouts if name not in ONE_ROW or self.positions not in ("offsets", "rows")]


def ways(
    call: Call, count: int | None, form: str | None, *, tables: bool = False, mode: str | None = None
) -> list[Way]:
    """Return the ways to pass positions, the most usual first.

    Args:
        call: the roles of the target's parameters.
        count: the number of axes of the positions, or None if a token has one position.
        form: the axes of the tensor of positions on several axes, such as "3bs", or None if all are tried.
        tables: whether tables are passed as well, which may state the positions.
        mode: "offsets" or "packed" returns this way alone, if its parameter is optional, and so not passed otherwise.
            With "int32", positions have this dtype, and not int64.
    """
    if mode == "int32":
        plain = ways(call, count, form, tables=tables)
        return [replace(way, arguments=partial(_in_int32, way.arguments)) for way in plain]
    roles = {*call.parameter_of}
    required = roles - call.optional
    names: tuple[str, ...] = ("given" if tables else "none", *(["packed"] if "cu_seqlens" in roles else []))
    if mode == "offsets":  # a parameter for one offset may accept a tensor of several
        names = (mode,) if {"offset", "offsets"} & (call.optional | (roles & {"offset"})) else ()
    elif mode == "packed":
        names = (mode,) if "cu_seqlens" in call.optional else ()
    elif count is None and "cu_seqlens" in required:
        names = ("runs",) if {"offset", "offsets"} & required else ("packed",)
    elif "positions" in (required if tables and "cos_sin_cache" not in roles else roles):
        if count is not None:
            forms = [form] if form else [f"{count}bs", f"bs{count}", f"{count}s", f"s{count}"]
            return [_of_a_tensor(call.parameter_of["positions"], each) for each in forms]
        names = "rows", "shared"
    elif count is not None and not tables:
        return _of_each_axis(call.parameter_of, count)
    elif {"offset", "offsets"} & (required if tables else roles):
        names = ("offsets", "offset") if "offsets" in roles else ("offset",)
    return [Way(name, _ROLES.get(name, ()), partial(_arguments, call.parameter_of, name)) for name in names]


def _arguments(parameter_of: Roles, name: str, positions: Tensor, q: Tensor) -> dict[str, Any]:
    row = positions.flatten(0, -2)[0]
    starts = run_starts(row)
    ends = torch.cat((starts, torch.tensor([len(row)])))
    first = {"offset": int(row[0]), "offsets": positions[..., 0].int(), "runs": row[starts].int()}
    values = {
        "positions": positions[..., 0, :] if name == "shared" else positions,
        "cu_seqlens": ends.int(),
        "max_seqlen": int(ends.diff().max()),
    } | dict.fromkeys(("offset", "offsets"), first.get(name))
    return {parameter_of[role]: values[role] for role in _ROLES.get(name, ()) if role in parameter_of}


def _in_int32(arguments: Callable[[Tensor, Tensor], dict[str, Any]], positions: Tensor, q: Tensor) -> dict[str, Any]:
    return {name: x.int() if isinstance(x, Tensor) else x for name, x in arguments(positions, q).items()}


def run_starts(positions: Tensor) -> Tensor:
    """Return the indices in positions `[seq]` at which they do not continue from the token before, int64 `[runs]`."""
    return torch.cat((torch.ones(1, dtype=torch.bool), positions.diff() != 1)).nonzero().flatten()


def _of_a_tensor(name: str, form: str) -> Way:
    def arguments(positions: Tensor, q: Tensor) -> dict[str, Any]:
        chosen, axes = (positions, "abs") if "b" in form else (positions[:, 0], "as")
        return {name: chosen.permute([axes.index(letter) for letter in re.sub(r"\d", "a", form)]).contiguous()}

    return Way("rows" if "b" in form else "shared", ("positions",), arguments)


def _of_each_axis(parameter_of: Roles, count: int) -> list[Way]:
    roles, side = tuple(role for role in _AXES if role in parameter_of), _SIDES[count]
    names = [parameter_of[role] for role in roles]
    if roles[-2:] == ("height", "width") and len(roles) == count:
        return [
            Way("rows", roles, lambda p, q: dict(zip(names, p.contiguous(), strict=True))),
            Way("shared", roles, lambda p, q: dict(zip(names, p[:, 0].contiguous(), strict=True))),
            Way("shared", roles, lambda p, q: dict(zip(names, _grid_of(p), strict=True)), side),
        ]
    if "grid" in parameter_of:
        name = parameter_of["grid"]
        return [
            Way("shared", ("grid",), lambda p, q: {name: _grid_of(p)}, side),
            Way("shared", ("grid",), lambda p, q: {name: torch.tensor([_grid_of(p)] * p.shape[1])}, side),
        ]
    return []


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


def sides(parameter_of: Roles) -> dict[str, int]:
    """Return a size for each side of a grid, if a function that computes all tables has parameters for them."""
    roles = [role for role in _AXES if role in parameter_of]
    return {parameter_of[role]: _SIDES[len(roles)] for role in roles} if roles[-2:] == ["height", "width"] else {}


def _grid_of(positions: Tensor) -> tuple[int, ...]:
    """Return the size of the smallest grid that contains all positions `[axes, batch, seq]`."""
    return tuple(int(p.max()) + 1 for p in positions)


def _cells_of(positions: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the index of each token `[batch, seq]` among the cells of a grid, which are in the order of rows."""
    cells = torch.zeros_like(positions[0])
    for axis, size in zip(positions, grid, strict=True):
        cells = cells * size + axis
    return cells


def rows_of_grid(
    tables: tuple[Tensor, ...], positions: Tensor, grid: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    """Return the rows `[batch, seq, columns]` at positions `[axes, batch, seq]` of tables of all cells of a grid.

    Without `grid`, it is the smallest that contains all positions.

    Raises:
        IndexError: a position is outside the grid.
    """
    grid = grid or _grid_of(positions)
    if bool((positions.amax((1, 2)) >= torch.tensor(grid)).any()):
        raise IndexError(f"a position is outside of a grid of {' × '.join(map(str, grid))} cells")
    cells = _cells_of(positions, grid)
    count = int(torch.tensor(grid).prod())
    return tuple(t.reshape(count, -1)[cells] for t in tables)


def on_grid(function: Callable[..., Any], call: Call, way: Way, layout: str) -> Callable[..., Any]:
    """Return a function that rotates tokens at any positions, from one that rotates all cells of a grid.

    It takes the positions `[axes, 1, seq]` as `positions`, instead of the size of the grid.
    """
    axis = layout.index("t" if layout in ONE_ROW else "s")  # of the tokens
    names = [call.parameter_of[role] for role in ("q", "k", "x") if role in call.parameter_of]
    by_name = accept_keywords(function)

    def rotate(*, positions: Tensor, **keywords: Any) -> Any:
        grid = _grid_of(positions)
        if (count := int(torch.tensor(grid).prod())) > _SIDES[len(grid)] ** len(grid):
            raise ValueError(f"check tries no grid of {' × '.join(map(str, grid))} cells")
        cells = _cells_of(positions, grid)[0]
        rows = keywords[names[0]].shape[layout.index("b")] if "b" in layout else 1
        earlier = torch.tril(cells[:, None] == cells, diagonal=-1).sum(1)  # tokens in the same cell before each token
        results: list[Tensor] = []
        for turn in range(int(earlier.max()) + 1):
            here = (earlier == turn).nonzero().flatten()
            whole = {}
            for name in names:
                x = keywords[name]
                empty = x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :])
                whole[name] = empty.index_copy(axis, cells[here], x.index_select(axis, here))
            passed = {name: x.detach().clone() for name, x in whole.items()}
            returned = by_name(**keywords | whole | way.arguments(positions.expand(-1, rows, -1), keywords[names[0]]))
            for name, x in whole.items():
                if not torch.equal(x.detach(), passed[name]):  # as the target would do with the tokens themselves
                    with torch.no_grad():
                        keywords[name].index_copy_(axis, here, x.index_select(axis, cells[here]))
            outs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
            results = results or [o.new_zeros(*o.shape[:axis], len(cells), *o.shape[axis + 1 :]) for o in outs]
            pairs = zip(results, outs, strict=True)
            results = [r.index_copy(axis, here, o.index_select(axis, cells[here])) for r, o in pairs]
        return results[0] if len(results) == 1 else tuple(results)

    return rotate
