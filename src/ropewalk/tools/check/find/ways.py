"""The ways to pass positions: for each token, as an offset, as the ends of documents, or on several axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk import Rope
from ropewalk.tools.check.find.words import Call, Roles

COUNTS = (2, 3, 4)
"""The numbers of axes that are tried if nothing states it."""

ONE_VECTOR = ("d", "1111d")
"""The layouts of one token of one head, alone or with four axes of size 1, as of rows, frames, lines and columns."""

ONE_TOKEN = ("hd", *ONE_VECTOR)
"""The layouts of one token, so that each token needs a call."""

ONE_HEAD = ("bsd", "td", "bds", *ONE_VECTOR)
"""The layouts of one head, so that each head needs a call."""

LAST = ("bsd", "td", "bhds", "bds", *ONE_TOKEN)
"""The layouts that are tried if no other rotates."""

ONE_ROW = ("thd", "td", *ONE_TOKEN)
"""The layouts without an axis for the rows of a batch."""

# Which positions are passed → the roles of the parameters that state them.
_ROLES = {
    "rows": ("positions", "k_positions"),
    "shared": ("positions", "k_positions"),
    "offset": ("offset", "offsets", "k_offset"),
    "offsets": ("offset", "offsets", "k_offset"),
    "packed": ("cu_seqlens", "max_seqlen"),
    "runs": ("cu_seqlens", "max_seqlen", "offset", "offsets"),
}
OF_POSITIONS = frozenset(role for roles in _ROLES.values() for role in roles)


@dataclass(frozen=True)
class Way:
    """A way to pass positions, and tables if the target takes them.

    `positions` says which: "rows" is a separate list for each row of the batch, and "shared" one list for the whole
    batch. With "offset", the target accepts the position of the first token and counts from there, with "offsets" from
    one position for each row. With "none", it counts from 0. With "packed", one row contains several documents, and the
    target counts from 0 in each, with "runs" from one position for each document. Before the tables are known, "given"
    means that they have a row for each token.
    """

    positions: str
    roles: tuple[str, ...]  # of the parameters that state them
    arguments: Callable[[Tensor, Tensor], dict[str, Any]]  # by name, for positions and for q in the target's layout
    given: Rope | None = None  # that of the tables that `check` passes, with which the target computes no angles
    tables: str | None = None  # the format of those that the target accepts or computes

    def fitting(self, layouts: Sequence[str]) -> list[str]:
        """Return the layouts of a target to which positions can be passed in this way, the most likely first."""
        if self.positions in ("packed", "runs"):  # all documents are in one row, in thd mostly without an axis for it
            return sorted((name for name in layouts if name in ("thd", "bshd")), reverse=True)
        return [name for name in layouts if name not in ONE_ROW or self.positions not in ("offsets", "rows")]


def ways(call: Call, count: int | None, *, tables: bool = False, mode: str | None = None) -> list[Way]:
    """Return the ways to pass positions, the most usual first.

    Args:
        call: the roles of the target's parameters.
        count: the number of axes of the positions, or None if a token has one position.
        tables: whether tables are passed as well, which may state the positions.
        mode: "offsets", "offset", "packed" or "rows" returns this way alone, if the plain call omits its parameter.
            "grids" and "tables" return the same as the plain call.
    """
    roles = {*call.parameter_of}
    required = roles - call.optional
    names: tuple[str, ...] = ("given" if tables else "none", *(["packed"] if "cu_seqlens" in roles else []))
    if mode == "offsets":  # a parameter for one offset may accept a tensor of several
        names = (mode,) if {"offset", "offsets"} & (call.optional | (roles & {"offset"})) else ()
    elif mode == "offset":  # a row of tables from which on they are read
        names = (mode,) if tables and "offset" in call.optional else ()
    elif mode == "packed":
        names = (mode,) if "cu_seqlens" in call.optional else ()
    elif mode == "rows":
        names = (mode,) if tables and "positions" in call.optional and "cos_sin_cache" not in roles else ()
    elif count is None and "cu_seqlens" in required:
        names = ("runs",) if {"offset", "offsets"} & required else ("packed",)
    elif "positions" in (required if tables and "cos_sin_cache" not in roles else roles):
        if count is not None:
            axes = [role for role in call.parameter_of if role.startswith("positions") or role == "k_positions"]
            forms = [f"{count}bs", f"{count}s"]
            if not any(role.startswith("positions_") for role in axes):
                usual = [form.replace("a", str(count)) for form in ("abs", "bsa", "as", "sa", "bas")]
                forms = [call.axes] if call.axes else usual
            return [_on_axes(call, axes, form) for form in forms]
        names = {"s": ("shared",), "bs": ("rows",)}.get(call.axes, ("rows", "shared"))
    elif count is not None and not tables:
        return []
    elif {"offset", "offsets"} & (required if tables else roles):
        names = ("offsets", "offset") if "offsets" in roles else ("offset", "offsets")
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
    values |= {"k_positions": values["positions"], "k_offset": values["offset"]}
    if {"offset", "offsets"} <= {*parameter_of} and name in ("offset", "offsets"):  # which are added to each other
        other = {"offset": "offsets", "offsets": "offset"}[name]
        values[other] = 0 if other == "offset" else torch.zeros_like(positions[..., 0], dtype=torch.int32)
    return {parameter_of[role]: values[role] for role in _ROLES.get(name, ()) if role in parameter_of}


def run_starts(positions: Tensor) -> Tensor:
    """Return the indices in positions `[seq]` at which they do not continue from the token before, int64 `[runs]`."""
    return torch.cat((torch.ones(1, dtype=torch.bool), positions.diff() != 1)).nonzero().flatten()


def _on_axes(call: Call, roles: list[str], form: str) -> Way:
    """Return the way to pass positions on several axes: in a tensor with the axes of `form`, or in one for each."""

    def arguments(positions: Tensor, q: Tensor) -> dict[str, Any]:
        chosen, axes = (positions, "abs") if "b" in form else (positions[:, 0], "as")
        chosen = chosen.permute([axes.index(letter) for letter in re.sub(r"\d", "a", form)]).contiguous()
        names = [call.parameter_of[role] for role in roles]
        return dict(zip(names, chosen, strict=True)) if "positions_1" in roles else dict.fromkeys(names, chosen)

    return Way("rows" if "b" in form else "shared", tuple(roles), arguments)


def count_of(axes: str) -> int | None:
    """Return the number of axes in "3bs", or None in "bs"."""
    digits = re.sub(r"\D", "", axes)
    return int(digits) if digits else None
