"""A tensor as rows of bytes in a file: some rows at a time, in any order, whatever the dtype.

Nothing here knows what a row means. So what is moved comes out bit for bit, and no tensor need fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ropewalk import _checks

CHUNK = 2**24
"""Bytes that are read at once, as far as rows are not longer."""

Bytes = npt.NDArray[np.uint8]


class Tensor(Protocol):
    """What can be read row by row: dtype in the words of safetensors ("BF16"), shape, bytes, and how many rows."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def rows(self) -> int: ...

    def read(self, first: int, last: int) -> Bytes:
        """Rows first to last - 1, `[rows, bytes of a row]`."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor that stands in a file, row after row; made by `stored`."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    rows: int

    def read(self, first: int, last: int) -> Bytes:
        """Read rows of the file; see `Tensor`."""
        width = row_bytes(self)
        with self.file.open("rb") as file:
            file.seek(self.offset + first * width)
            content = file.read((last - first) * width)
        if len(content) != (last - first) * width:
            must = f"{self.file} must stay as it is while it is read"
            raise _checks.error("convert", must, "a shorter one", "Run the same again.")
        return np.frombuffer(content, np.uint8).reshape(last - first, width)


@dataclass(frozen=True)
class Joined:
    """Pieces of one matrix: one below the other (axis 0) or side by side (axis 1)."""

    pieces: tuple[Tensor, ...]
    axis: int

    @property
    def dtype(self) -> str:
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.pieces[0].shape
        total = sum(piece.shape[self.axis] for piece in self.pieces)
        return (total, *first[1:]) if self.axis == 0 else (first[0], total)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def rows(self) -> int:
        return self.shape[0]

    def read(self, first: int, last: int) -> Bytes:
        """Read from all pieces that have some of it; see `Tensor`."""
        if self.axis == 1:
            return np.concatenate([piece.read(first, last) for piece in self.pieces], axis=1)
        found, begin = [], 0
        for piece in self.pieces:
            end = begin + piece.shape[0]
            if first < end and begin < last:
                found.append(piece.read(max(first, begin) - begin, min(last, end) - begin))
            begin = end
        return np.concatenate(found) if found else np.empty((0, row_bytes(self)), np.uint8)


@dataclass(frozen=True, eq=False)
class Reordered:
    """The rows of another tensor in another order: row r is its row `order[r]`."""

    tensor: Tensor
    order: npt.NDArray[np.int64]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def rows(self) -> int:
        return self.tensor.rows

    def read(self, first: int, last: int) -> Bytes:
        """Read the span in which these rows stand, which is little more than they are; see `Tensor`."""
        wanted = self.order[first:last]
        if not len(wanted):
            return self.tensor.read(0, 0)
        begin = int(wanted.min())
        return self.tensor.read(begin, int(wanted.max()) + 1)[wanted - begin]


def stored(file: Path, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Stored:
    """A tensor of a file. A row of it is all that has the same first index; a tensor without such rows is one row."""
    whole = not shape or (shape[0] > 0 and nbytes % shape[0] != 0)
    return Stored(file, offset, nbytes, dtype, shape, 1 if whole else shape[0])


def by_number(tensor: Stored) -> Stored:
    """The same tensor with each number as a row: the weights of norms, whatever their shape."""
    return replace(tensor, rows=math.prod(tensor.shape))


def row_bytes(tensor: Tensor) -> int:
    """Bytes of a row."""
    return tensor.nbytes // tensor.rows if tensor.rows else 0


def chunks(tensor: Tensor) -> Iterator[Bytes]:
    """All rows in order, some at a time."""
    total = tensor.rows
    step = max(1, CHUNK // max(1, row_bytes(tensor)))
    for first in range(0, total, step):
        yield tensor.read(first, min(first + step, total))
