"""Call code that counts the rows and columns of a grid as if it took the position of each token on both."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import words
from ropewalk.tools.check.find.target import code_of

SIDES = (65, 67)  # rows and columns of the largest grid: more than positions are measured, and not a square
_TENSORS = ("q", "k", "v", "x", "qkv")
_SIZES = ("frames", "height", "width", "grid")


# The size of a grid in one argument, with the frames of a video, and for each row of a batch.
_FORMS: tuple[Callable[[int, int, int], Any], ...] = (
    lambda rows, columns, _: (rows, columns),
    lambda rows, columns, _: (1, rows, columns),
    lambda rows, columns, batch: torch.tensor([[rows, columns]] * batch),
    lambda rows, columns, batch: torch.tensor([[1, rows, columns]] * batch),
)


def sizes_of(function: Any) -> dict[str, str]:
    """Return the role and the name of each parameter for the size of a grid, if a function takes no positions."""
    call = words.read_call(function)
    roles = {*call.parameter_of}
    required = roles - call.optional
    if not required & {"grid", "height"} or required & {"positions", "cos", "freqs_cis"}:
        return {}
    return {role: call.parameter_of[role] for role in _SIZES if role in required}


def spread(function: Any, sides: tuple[int, int] | None = None, *, makes_tables: bool = False) -> Any:
    """Return a function of positions "2s" on rows and columns that calls one of a grid. A video has one frame.

    The tokens are put at their places on the smallest grid that has all of them, which is not a square, or on one of
    `sides`, and are read there from the result. Of tables, the rows at these places are returned.
    """
    roles, known = words.read_call(function).parameter_of, words.parameters(function) or {}
    names = {} if sides else sizes_of(function)
    tensors = [] if makes_tables else [roles[role] for role in _TENSORS if role in roles]
    forms: list[Callable[[int, int, int], Any] | None] = (
        [*_FORMS] if "grid" in names else [None]
    )  # or only that which works

    def call(given: dict[str, Any], rows: int, columns: int) -> list[Tensor]:
        error = None
        for i, form in enumerate(forms):
            sizes: Any = dict(zip(_SIZES, (1, rows, columns), strict=False))
            if form is not None:
                sizes["grid"] = form(rows, columns, len(given[tensors[0]]) if tensors else 1)
            try:
                returned = function(**given, **{name: sizes[role] for role, name in names.items()})
            except Exception as e:  # it takes the sizes in another form
                error = error or e
                continue
            forms[:] = forms[i : i + 1]
            returned = [given[name] for name in tensors] if returned is None else returned
            return [x for x in ([returned] if isinstance(returned, Tensor) else returned) if isinstance(x, Tensor)]
        raise error or TypeError("no form of the sizes is known")

    def counted(positions: Tensor, tensor_layout: str = "s", **passed: Any) -> Any:
        rows, columns = ((int(p.max()) + 1) | 1 for p in positions)  # odd: code that merges patches has another order
        columns += 2 * (rows == columns)
        if rows > SIDES[0]:
            raise IndexError(f"grids of over {SIDES[0]} rows are not tried")
        rows, columns = sides or (rows, columns)
        place, axis = positions[0] * columns + positions[1], re.search("[st]", tensor_layout).start()  # type: ignore[union-attr]
        copy = (place[:, None] == place).tril(-1).sum(-1)  # of several tokens at one place, each has a grid of its own
        order = [(copy == n).nonzero().flatten() for n in range(int(copy.max()) + 1)]
        parts = []
        for tokens in order:
            given = dict(passed)
            for name in tensors:
                x = passed[name]
                empty = x.new_zeros(*x.shape[:axis], rows * columns, *x.shape[axis + 1 :])
                given[name] = empty.index_copy(axis, place[tokens], x.index_select(axis, tokens))
            found = call(given, rows, columns)
            if not tensors:  # tables, which may have an axis for each side
                found = [x if rows * columns in x.shape[:-1] else x.flatten(0, 1) for x in found]
                found = [x.movedim(x.shape.index(rows * columns), 0) for x in found]
            parts.append([x.index_select(axis, place[tokens]) for x in found])
        back = torch.cat(order).argsort()
        out = tuple(torch.cat(part, axis).index_select(axis, back) for part in zip(*parts, strict=True))
        return out if len(out) > 1 else out[0]

    kept = [p.replace(kind=p.KEYWORD_ONLY) for name, p in known.items() if name not in names.values()]
    own: dict[str, Any] = {"positions": "2s"} | ({"tensor_layout": str} if tensors else {})
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=a) for n, a in own.items()]
    counted.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    counted.__wrapped__ = code_of(function)  # type: ignore[attr-defined]
    return counted
