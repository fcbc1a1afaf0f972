"""Tensors as rows of bytes in a file, which are read a few at a time, in any order, for any dtype.

This module does not interpret the bytes, so rows are moved bit for bit, and no tensor has to fit in memory.
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
"""The number of bytes that are read at once, unless a single row is longer."""

Bytes = npt.NDArray[np.uint8]


class Tensor(Protocol):
    """A tensor that is read row by row. Its dtype has the name of safetensors, such as "BF16"."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def rows(self) -> int: ...

    def read(self, first: int, last: int) -> Bytes:
        """Read rows first to last - 1, `[rows, bytes of a row]`."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, stored row after row. Create it with `stored`."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    rows: int

    def read(self, first: int, last: int) -> Bytes:
        """Read rows from the file; see `Tensor`."""
        width = row_bytes(self)
        with self.file.open("rb") as file:
            file.seek(self.offset + first * width)
            content = file.read((last - first) * width)
        if len(content) != (last - first) * width:
            must = f"{self.file} must not change while it is read"
            raise _checks.error("convert", must, "a shorter file", "Run the same command again.")
        return np.frombuffer(content, np.uint8).reshape(last - first, width)


@dataclass(frozen=True)
class Joined:
    """The pieces of one matrix, concatenated by rows (axis 0) or by columns (axis 1)."""

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
        """Read rows from the pieces that contain them; see `Tensor`."""
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
    """A permutation of the rows of another tensor: row r is its row `order[r]`."""

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
        """Read the span of rows that contains the wanted ones, which is hardly longer; see `Tensor`."""
        wanted = self.order[first:last]
        if not len(wanted):
            return self.tensor.read(0, 0)
        begin = int(wanted.min())
        return self.tensor.read(begin, int(wanted.max()) + 1)[wanted - begin]


def stored(file: Path, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Stored:
    """A tensor in a file. A row is everything with the same first index. A tensor without such rows is one row."""
    whole = not shape or (shape[0] > 0 and nbytes % shape[0] != 0)
    return Stored(file, offset, nbytes, dtype, shape, 1 if whole else shape[0])


def by_number(tensor: Stored) -> Stored:
    """The same tensor with one row for each number, for the weights of norms of any shape."""
    return replace(tensor, rows=math.prod(tensor.shape))


def row_bytes(tensor: Tensor) -> int:
    """The number of bytes of a row."""
    return tensor.nbytes // tensor.rows if tensor.rows else 0


def chunks(tensor: Tensor) -> Iterator[Bytes]:
    """Yield all rows in order, a few at a time."""
    total = tensor.rows
    step = max(1, CHUNK // max(1, row_bytes(tensor)))
    for first in range(0, total, step):
        yield tensor.read(first, min(first + step, total))
