"""Tensors in files as rows of bytes, which are read in chunks, so that no tensor has to fit in memory.

This module never interprets the bytes, so all dtypes are read alike, and rows are copied bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropewalk import _checks

CHUNK = 2**24
"""The number of bytes that are read at once, unless a single row is longer."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """A tensor that is read as rows of bytes. Its dtype is named as in safetensors, e.g. "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rows: int

    def read(self, first: int, last: int) -> Bytes:
        """Read rows `first` to `last` - 1. Return their bytes, uint8 `[last - first, bytes of a row]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoredTensor(Tensor):
    """A tensor that is stored in a file, row after row. `tensor_in_file` computes its number of rows."""

    file: Path
    offset: int

    def read(self, first: int, last: int) -> Bytes:
        """Read rows from the file, as in `Tensor`."""
        width = row_bytes(self)
        with self.file.open("rb") as file:
            file.seek(self.offset + first * width)
            content = file.read((last - first) * width)
        if len(content) != (last - first) * width:
            must = f"{self.file} must not change while it is read"
            raise _checks.error("convert", must, "a shorter file", "Run the same command again.")
        return np.frombuffer(content, np.uint8).reshape(last - first, width)


@dataclass(frozen=True)
class JoinedTensor(Tensor):
    """A matrix whose pieces are stored separately. `join` makes it."""

    pieces: tuple[Tensor, ...]
    axis: int

    def read(self, first: int, last: int) -> Bytes:
        """Read rows from the pieces that contain them, as in `Tensor`."""
        if self.axis == 1:
            return np.concatenate([piece.read(first, last) for piece in self.pieces], axis=1)
        parts, begin = [], 0
        for piece in self.pieces:
            end = begin + piece.shape[0]
            if first < end and begin < last:
                parts.append(piece.read(max(first, begin) - begin, min(last, end) - begin))
            begin = end
        return np.concatenate(parts) if parts else np.empty((0, row_bytes(self)), np.uint8)


@dataclass(frozen=True, eq=False)
class ReorderedTensor(Tensor):
    """A tensor with permuted rows: row r is row `order[r]` of `tensor`. `reorder` makes it."""

    tensor: Tensor
    order: npt.NDArray[np.int64]

    def read(self, first: int, last: int) -> Bytes:
        """Read rows, as in `Tensor`, by reading the span of `tensor` that contains all of them.

        Rows only move within a head, so the span is hardly longer than the rows.
        """
        wanted = self.order[first:last]
        if not len(wanted):
            return self.tensor.read(0, 0)
        begin = int(wanted.min())
        return self.tensor.read(begin, int(wanted.max()) + 1)[wanted - begin]


def tensor_in_file(file: Path, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return the tensor of this shape that is stored at an offset in a file.

    A row consists of all elements with the same first index. The whole tensor is one row if it has no axes, or if its
    number of bytes is not a multiple of the length of its first axis. A tensor without elements has no rows.
    """
    rows = 0 if nbytes == 0 else shape[0] if shape and nbytes % shape[0] == 0 else 1
    return StoredTensor(dtype, shape, nbytes, rows, file, offset)


def join(pieces: Sequence[Tensor], axis: int) -> JoinedTensor:
    """Return the matrix that pieces of equal shape and dtype form along rows (axis 0) or columns (axis 1)."""
    first = pieces[0]
    height, width = first.shape
    shape = (len(pieces) * height, width) if axis == 0 else (height, len(pieces) * width)
    return JoinedTensor(first.dtype, shape, len(pieces) * first.nbytes, shape[0], tuple(pieces), axis)


def reorder(tensor: Tensor, order: npt.NDArray[np.int64]) -> ReorderedTensor:
    """Return a tensor whose row r is row `order[r]` of this tensor."""
    return ReorderedTensor(tensor.dtype, tensor.shape, tensor.nbytes, tensor.rows, tensor, order)


def as_column(tensor: Tensor) -> Tensor:
    """Return the weight or bias of a norm, if it has any shape in a file, as a column with one number in each row."""
    return replace(tensor, rows=math.prod(tensor.shape)) if isinstance(tensor, StoredTensor) else tensor


def row_bytes(tensor: Tensor) -> int:
    """Return the number of bytes of a row."""
    return tensor.nbytes // tensor.rows if tensor.rows else 0


def chunks(tensor: Tensor) -> Iterator[Bytes]:
    """Yield all rows in order, in chunks of at most `CHUNK` bytes, or of a single row that is longer."""
    total = tensor.rows
    step = max(1, CHUNK // max(1, row_bytes(tensor)))
    for first in range(0, total, step):
        yield tensor.read(first, min(first + step, total))
