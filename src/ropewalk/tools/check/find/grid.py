"""Call code that counts frames, rows and columns of a grid as if it took the position of each token on them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.tools.check.find import words

SIDES = (65, 67)  # rows and columns of the largest grid: more than positions are measured, and not a square
_TENSORS = ("q", "k", "v", "x", "qkv")
_SIZES = ("frames", "height", "width", "grid", "crops", "latent")
_MOST = 20_000  # tokens of the largest grid
# The sizes of grids in one argument, with the frames of a video. In a tensor, each grid may have another size.
_FORMS: tuple[Callable[[list[tuple[int, ...]]], Any], ...] = (
    lambda grids: grids[0],
    lambda grids: _of_video(grids[0]),
    lambda grids: torch.tensor(grids),
    lambda grids: torch.tensor([*map(_of_video, grids)]),
)


def _of_video(sides: tuple[int, ...]) -> tuple[int, ...]:
    return (*(1,) * (3 - len(sides)), *sides)


def sizes_of(function: Any) -> dict[str, str]:
    """Return the role and the name of each parameter for the size of a grid, if a function takes no positions."""
    call = words.read_call(function)
    roles = {*call.parameter_of}
    required = (roles - call.optional) or roles
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
    in_one: bool = False,
    before: int = 0,
) -> Any:
    """Return a function of positions on the axes of a grid that calls one of its size. A video may have one frame.

    The tokens are put at their places on the smallest grid that has all of them, or on one of `sides`, and are read
    there from the result. Of tables, the rows at these places are returned. Positions are rows and columns, or columns
    and rows. Several grids are passed `in_one` call if their sizes are in a tensor, or each in a call of its own. As
    many other tokens come `before` them.
    """
    known, names = words.parameters(function) or {}, {} if sides else sizes_of(function)
    roles = {} if makes_tables else words.read_call(function).parameter_of
    tensors = [roles[role] for role in _TENSORS if role in roles]
    is_square = "grid" in names and known[names["grid"]].annotation in (int, "int")
    forms: list[Callable[[list[tuple[int, ...]]], Any]] = [lambda grids: grids[0][-1]] if is_square else [*_FORMS]
    grids = _Grids(function, names, tensors, forms, sides, is_square, columns_first, in_one, before)
    kept = [p for name, p in known.items() if name not in names.values()]
    kind, count = inspect.Parameter.KEYWORD_ONLY, 2 if sides else count or counts_of(function)[-1]
    own = {"positions": f"{count}s"} | ({"tensor_layout": "str"} if tensors else {})
    added = (inspect.Parameter(name, kind, annotation=annotation) for name, annotation in own.items())
    return words.stands_for(partial(grids), function, [*kept, *added])


@dataclass(frozen=True)
class _Grids:
    """A function of tokens at any places, which calls one of whole grids, or one that computes their tables."""

    function: Any
    names: dict[str, str]  # of the parameters for the sizes, by role
    tensors: list[str]  # the names of those for tokens, or none of code that computes tables
    forms: list[Callable[[list[tuple[int, ...]]], Any]]  # of the sizes in one argument, or the one that works
    sides: tuple[int, int] | None  # of every grid
    is_square: bool
    columns_first: bool
    in_one: bool
    before: int

    def __call__(self, positions: Tensor, tensor_layout: str = "s", **passed: Any) -> Any:
        """Return the results for tokens at positions `[axes, tokens]`: each that is at 0 on all axes begins a grid."""
        positions = torch.cat((positions[:-2], positions[-2:].flip(0))) if self.columns_first else positions
        of = torch.cat((positions, (positions == 0).all(0).cumsum(0)[None]))
        is_same = (of[:, :, None] == of[:, None]).all(0)  # of several tokens at one place, each has a grid of its own
        keys = [*zip(of[-1].tolist(), is_same.tril(-1).sum(-1).tolist(), strict=True)]
        grids = [torch.tensor([i for i, of_token in enumerate(keys) if of_token == key]) for key in sorted({*keys})]
        sizes = [self._size(positions[:, tokens]) for tokens in grids]
        block, axis = 1 if self.sides else block_of(self.function), min(tensor_layout.find(name) % 9 for name in "st")
        places = [places_of(positions[:, g], size[-2:], block) for g, size in zip(grids, sizes, strict=True)]
        in_one = len(grids) if self.in_one and self.forms[0] in _FORMS[2:] else 1
        groups = [slice(n, n + in_one) for n in range(0, len(grids), in_one)]
        parts = [self._run(grids[g], places[g], sizes[g], axis, tensor_layout, passed) for g in groups]
        back = torch.cat(grids).argsort()
        out = tuple(torch.cat(part, axis).index_select(axis, back) for part in zip(*parts, strict=True))
        return out if len(out) > 1 else out[0]

    def _size(self, positions: Tensor) -> tuple[int, ...]:
        """Return the size of the smallest grid that has all of these places.

        The number of blocks is odd, as code that merges patches without an attribute for it refuses, unless a table of
        64 ends there.
        """
        block = block_of(self.function)
        counts = [int(p.max()) // block + 1 for p in positions]
        *others, rows, columns = ((n if n * block == 64 else n | 1) * block for n in counts)
        rows, columns = (max(rows, columns),) * 2 if self.is_square else (rows, columns)
        size = self.sides or (*others, rows, columns)
        if math.prod(size) > _MOST or max(rows, columns) > max(size):
            raise IndexError(f"grids of over {_MOST:,} tokens are not tried")
        return size

    def _run(
        self,
        grids: list[Tensor],
        places: list[Tensor],
        sizes: list[tuple[int, ...]],
        axis: int,
        layout: str,
        passed: dict[str, Any],
    ) -> list[Tensor]:
        """Call the function once, with grids as rows of a batch or after each other, and return results by token."""
        has_rows = bool(self.tensors) and "b" in layout
        rows = passed[self.tensors[0]].shape[layout.index("b")] if has_rows else 1
        places = [self.before + place for place in places]
        counts = [self.before + math.prod(size) for size in sizes]
        counts = [max(counts)] * len(counts) if has_rows else counts
        given = dict(passed)
        for name in self.tensors:
            x = passed[name]
            empty = [x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :]) for count in counts]
            of_each = zip(empty, places, grids, strict=True)
            filled = [e.index_copy(axis, place, x.index_select(axis, tokens)) for e, place, tokens in of_each]
            given[name] = torch.cat(filled, layout.index("b") if has_rows else axis)
        found = self._call(given, [size for size in sizes for _ in range(rows)])
        if not self.tensors:  # tables, which may have an axis for each side
            total = sum(counts)
            found = [x if total in x.shape[:-1] else x.flatten(0, len(sizes[0]) - 1) for x in found]
            if any(total not in x.shape[:-1] for x in found):
                raise IndexError(f"the tables have no rows for a grid of {' × '.join(map(str, sizes[0]))}")
            found = [x.movedim(x.shape.index(total), 0) for x in found]
        parts = [torch.split(x, *((rows, layout.index("b")) if has_rows else (counts, axis))) for x in found]
        return [torch.cat([x.index_select(axis, p) for x, p in zip(xs, places, strict=True)], axis) for xs in parts]

    def _call(self, given: dict[str, Any], sizes: list[tuple[int, ...]]) -> list[Tensor]:
        error, stated = None, dict(zip(("width", "height", "frames"), (*sizes[0][::-1], 1), strict=False))
        of_grid = [size[-2:] for size in sizes] if "frames" in self.names else sizes
        for i, form in enumerate(self.forms):
            values: dict[str, Any] = stated | {"grid": form(of_grid), "crops": ((0, 0), sizes[0][-2:])}
            if "latent" in self.names:
                pixels = (n * patch for n, patch in zip(sizes[0], _patch(self.function), strict=True))
                shape = (1, *pixels, 1) if self.names["latent"].endswith("_C") else (1, 1, *pixels)
                values["latent"] = torch.zeros(shape)
            try:
                returned = self.function(**given, **{name: values[role] for role, name in self.names.items()})
            except Exception as e:  # it takes the sizes in another form
                error = error or e
                continue
            self.forms[:] = self.forms[i : i + 1]
            returned = [given[name] for name in self.tensors] if returned is None else returned
            return [x for x in ([returned] if isinstance(returned, Tensor) else returned) if isinstance(x, Tensor)]
        raise error or TypeError("no form of the sizes is known")


def places_of(positions: Tensor, sides: Sequence[int], block: int) -> Tensor:
    """Return the index of each token at positions `[axes, tokens]`, where those of each block follow each other."""
    (rows, columns), (*frames, row, column) = sides, positions
    index = (row // block * (columns // block) + column // block) * block**2 + row % block * block + column % block
    return torch.as_tensor(index + rows * columns * sum(frames))


def block_of(function: Any) -> int:
    """Return the side of the blocks of patches that an object merges, in whose order their tokens are, or 1."""
    known = getattr(getattr(function, "__self__", function), "__dict__", {})
    return next((n for name, n in known.items() if "merge" in name and isinstance(n, int) and n > 1), 1)


def more_rows(function: Any, sides: Sequence[int]) -> int:
    """Return how many rows more than a grid has tokens the tensors of an object have, as for a class token."""
    owner, total = getattr(function, "__self__", function), math.prod(sides)
    tensors = (*getattr(owner, "__dict__", {}).values(), *getattr(owner, "_buffers", {}).values())
    more = (rows - total for x in tensors if isinstance(x, Tensor) for rows in x.shape[:-1])
    return min((n for n in more if 0 < n <= 8), default=0)


def _patch(function: Any) -> tuple[int, int, int]:
    """Return the frames, rows and columns of a patch that an object has, or 1 of each."""
    known = vars(getattr(function, "__self__", function))
    side = known.get("patch_size", 1)
    return tuple(side) if isinstance(side, list | tuple) else (known.get("patch_size_t", 1), side, side)
