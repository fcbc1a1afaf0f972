"""Call code that counts frames, rows and columns of a grid as if it took the position of each token on them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import words

SIDES = (65, 67)  # rows and columns of the largest grid: more than positions are measured, and not a square
_TENSORS = ("q", "k", "v", "x", "qkv")
_SIZES = ("frames", "height", "width", "grid", "latent")
_MOST = 20_000  # tokens of the largest grid
# The size of a grid in one argument, with the frames of a video, and for each row of a batch.
_FORMS: tuple[Callable[[tuple[int, ...], int], Any], ...] = (
    lambda sides, _: sides,
    lambda sides, _: (*(1,) * (3 - len(sides)), *sides),
    lambda sides, batch: torch.tensor([sides] * batch),
    lambda sides, batch: torch.tensor([(*(1,) * (3 - len(sides)), *sides)] * batch),
)


def sizes_of(function: Any) -> dict[str, str]:
    """Return the role and the name of each parameter for the size of a grid, if a function takes no positions."""
    call = words.read_call(function)
    roles = {*call.parameter_of}
    required = roles - call.optional
    tables = {"positions", "cos"} if "grid" in required else {"positions", "cos", "freqs_cis"}
    if not required & {"grid", "height", "latent"} or required & tables:
        return {}
    return {role: call.parameter_of[role] for role in _SIZES if role in required}


def counts_of(function: Any) -> tuple[int, ...]:
    """Return the numbers of sides that a grid may have: three if it has the frames of a video."""
    names, known = sizes_of(function), words.parameters(function) or {}
    one = names.get("grid", "")
    stated = str(known[one].annotation).count("int") if one else 0
    if stated == 3 or {"frames", "latent"} & {*names}:
        return (3,)
    return (2,) if not one or stated or re.search("(^|_)hws?$", one) else (3, 2)


def spread(
    function: Any,
    sides: tuple[int, int] | None = None,
    *,
    count: int | None,
    makes_tables: bool = False,
    columns_first: bool = False,
) -> Any:
    """Return a function of positions on the axes of a grid that calls one of its size. A video may have one frame.

    The tokens are put at their places on the smallest grid that has all of them, or on one of `sides`, and are read
    there from the result. Of tables, the rows at these places are returned. Positions are rows and columns, or columns
    and rows.
    """
    roles, known = words.read_call(function).parameter_of, words.parameters(function) or {}
    names = {} if sides else sizes_of(function)
    tensors = [] if makes_tables else [roles[role] for role in _TENSORS if role in roles]
    block = 1 if sides else block_of(function)
    is_square = "grid" in names and known[names["grid"]].annotation in (int, "int")
    forms = [lambda sides, _: sides[-1]] if is_square else [*_FORMS]  # or only that which works

    def call(given: dict[str, Any], sizes: tuple[int, ...], batch: int) -> list[Tensor]:
        error, stated = None, dict(zip(("width", "height", "frames"), (*sizes[::-1], 1), strict=False))
        for i, form in enumerate(forms):
            values: dict[str, Any] = stated | {"grid": form(sizes, batch)}
            if "latent" in names:
                pixels = (n * patch for n, patch in zip(sizes, _patch(function), strict=True))
                values["latent"] = torch.zeros(1, 1, *pixels)
            try:
                returned = function(**given, **{name: values[role] for role, name in names.items()})
            except Exception as e:  # it takes the sizes in another form
                error = error or e
                continue
            forms[:] = forms[i : i + 1]
            returned = [given[name] for name in tensors] if returned is None else returned
            return [x for x in ([returned] if isinstance(returned, Tensor) else returned) if isinstance(x, Tensor)]
        raise error or TypeError("no form of the sizes is known")

    def counted(positions: Tensor, tensor_layout: str = "s", **passed: Any) -> Any:
        positions = torch.cat((positions[:-2], positions[-2:].flip(0))) if columns_first else positions
        # An odd number of blocks, as code that merges patches without an attribute for it refuses.
        *others, rows, columns = (((int(p.max()) // block + 1) | 1) * block for p in positions)
        rows, columns = (max(rows, columns),) * 2 if is_square else (rows, columns)
        sizes = sides or (*others, rows, columns)
        if (count := math.prod(sizes)) > _MOST or any(n > max(sizes) for n in (rows, columns)):
            raise IndexError(f"grids of over {_MOST:,} tokens are not tried")
        axis = min(tensor_layout.find(name) % 9 for name in "st")
        *frames, row, column = positions
        place = (
            (row // block * (sizes[-1] // block) + column // block) * block**2 + row % block * block + column % block
        )
        place = place + sum(frames) * sizes[-2] * sizes[-1]
        copy = (place[:, None] == place).tril(-1).sum(-1)  # of several tokens at one place, each has a grid of its own
        order = [(copy == n).nonzero().flatten() for n in range(int(copy.max()) + 1)]
        parts = []
        for tokens in order:
            given = dict(passed)
            for name in tensors:
                x = passed[name]
                empty = x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :])
                given[name] = empty.index_copy(axis, place[tokens], x.index_select(axis, tokens))
            has_rows = tensors and "b" in tensor_layout
            found = call(given, sizes, given[tensors[0]].shape[tensor_layout.index("b")] if has_rows else 1)
            if not tensors:  # tables, which may have an axis for each side
                found = [x if count in x.shape[:-1] else x.flatten(0, len(sizes) - 1) for x in found]
                if any(count not in x.shape[:-1] for x in found):
                    raise IndexError(f"the tables have no rows for a grid of {' × '.join(map(str, sizes))}")
                found = [x.movedim(x.shape.index(count), 0) for x in found]
            parts.append([x.index_select(axis, place[tokens]) for x in found])
        back = torch.cat(order).argsort()
        out = tuple(torch.cat(part, axis).index_select(axis, back) for part in zip(*parts, strict=True))
        return out if len(out) > 1 else out[0]

    kept = [p for name, p in known.items() if name not in names.values()]
    kind, count = inspect.Parameter.KEYWORD_ONLY, 2 if sides else count or counts_of(function)[-1]
    own = {"positions": f"{count}s"} | ({"tensor_layout": "str"} if tensors else {})
    added = (inspect.Parameter(name, kind, annotation=annotation) for name, annotation in own.items())
    return words.stands_for(counted, function, [*kept, *added])


def block_of(function: Any) -> int:
    """Return the side of the blocks of patches that an object merges, in whose order their tokens are, or 1."""
    known = getattr(getattr(function, "__self__", function), "__dict__", {})
    return next((n for name, n in known.items() if "merge" in name and isinstance(n, int) and n > 1), 1)


def _patch(function: Any) -> tuple[int, int, int]:
    """Return the frames, rows and columns of a patch that an object has, or 1 of each."""
    known = vars(getattr(function, "__self__", function))
    side = known.get("patch_size", 1)
    return tuple(side) if isinstance(side, list | tuple) else (known.get("patch_size_t", 1), side, side)
