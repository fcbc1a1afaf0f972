"""The header of a GGUF file: numbers, short strings and lists of its keys, and the tensors that divide frequencies.

Walked here and not by the gguf package, which loops over whatever counts a header claims. No length is believed before
it is held against what is left of the file, and nothing else is kept.
"""

from __future__ import annotations

import dataclasses
import math
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from ropewalk._checks import MAX_HEAD_DIM, RopeError, error, integer, shown
from ropewalk.schemes import LongRoPE, PerPair

MAGIC = b"GGUF"
FREQS = PerPair.gguf["factors"]
SHORT, LONG = LongRoPE.gguf["short_factor"], LongRoPE.gguf["long_factor"]

_NEVER_TURNS = 1e30  # what converters write for a pair that stands still
# Bounds far above any model, so that a corrupt file costs neither time nor memory.
_MAX_KEYS = 10_000
_MAX_TENSORS = 65_536
_MAX_ARRAYS = 10_000  # inside other arrays
_MAX_ITEMS = 2**21  # in one array; and strings, keys and tensors together: 800,000 with a vocabulary of 262,144
_MAX_BYTES = 2**28  # of the whole header; that of a model with 262,144 tokens has some 20 MiB
_MAX_STRING = 2**26
_MAX_NAME = 256  # of a key or tensor; longer strings are passed over
_MAX_KEPT = 512  # numbers of an array, which is the most layers that llama.cpp takes; longer arrays are passed over
_MAX_NESTING = 4
_MAX_ALIGNMENT = 2**20

_STRING, _ARRAY, _F32 = 8, 9, 0
_BROKEN = "Is the file broken?"
_NUMBERS = {
    code: struct.Struct(f"<{letter}")
    for code, letter in ((0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"), (7, "?"), (10, "Q"),
                         (11, "q"), (12, "d"))
}  # fmt: skip
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_BLOCK = 2**18  # bytes of a list of strings that are read at once


@dataclasses.dataclass(frozen=True)
class _NotKept:
    """Stands for a value that was passed over."""

    what: str

    def __repr__(self) -> str:
        return self.what


@dataclasses.dataclass(frozen=True)
class _Tensor:
    dims: tuple[int, ...]
    kind: int
    offset: int


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """The values of all keys and the tensors of factors."""
    if not path.is_file():
        raise error(str(path), "the model must be a file", "none there", "Is the path right?")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise error(str(path), "the model must be a file", "something else", "Is the path right?")
        walk = _Walk(file, status.st_size, str(path))
        tensor_count, key_count = walk.counts()
        values = walk.values(key_count)
        infos = walk.tensors(tensor_count)
        start = _data_start(walk.position, values, str(path))
        return values, {name: walk.floats(name, info, start) for name, info in infos.items()}


def _data_start(position: int, values: dict[str, Any], source: str) -> int:
    alignment = values.get("general.alignment", 32)
    alignment = integer(source, "general.alignment", alignment, at_least=1, at_most=_MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise error(
            f"{source}: general.alignment", "it must be a power of 2", str(alignment), "Convert the model anew."
        )
    return -(-position // alignment) * alignment


class _Walk:
    """The header of a file, front to back. No length is believed before it is held against what is left."""

    def __init__(self, file: BinaryIO, size: int, source: str) -> None:
        self.file = file
        self.size = size
        self.most = _MAX_BYTES
        self.source = source
        self.position = 0
        self.items = 0
        self.arrays = 0
        self.where = "the header"

    def error(self, must: str, got: str, cure: str = "Is the file complete?") -> RopeError:
        return error(f"{self.source}: {self.where}", must, got, cure)

    def _need(self, count: int) -> None:
        if count > self.size - self.position:
            raise self.error(
                f"the file must go on for {shown(count)} more bytes", f"{self.size - self.position} that are left"
            )
        if self.position + count > self.most:
            raise self.error(f"the header must have at most {self.most} bytes", "more", "Is this a model?")

    def _take(self, count: int) -> bytes:
        self._need(count)
        content = self.file.read(count)
        if len(content) < count:
            raise self.error("the file must not change while it is read", "an early end")
        self.position += count
        return content

    def _skip(self, count: int) -> None:
        self._need(count)
        self.file.seek(count, os.SEEK_CUR)
        self.position += count

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        count: int = self._number(_U64)
        if count > most:
            raise self.error(f"{what} must be at most {most}", str(count), _BROKEN)
        self._need(count * least_bytes)
        return count

    def _item(self, count: int = 1) -> None:
        self.items += count
        if self.items > _MAX_ITEMS:
            raise self.error(f"keys, strings and tensors must be at most {_MAX_ITEMS}", "more", "Is this a model?")

    def _name(self, what: str) -> str:
        self._item()
        content = self._take(self._count(f"the bytes of {what}", _MAX_NAME, 1))
        return self._text(content)

    def _text(self, content: bytes) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("it must be UTF-8", shown(content), _BROKEN) from None

    def counts(self) -> tuple[int, int]:
        """How many tensors and keys there are."""
        magic = self._take(4)
        if magic != MAGIC:
            raise self.error(f"the file must begin with {MAGIC!r}", shown(magic), "Is this a GGUF file?")
        version: int = self._number(_U32)
        if version not in (2, 3):
            big = " It looks like a big-endian file." if version & 0xFFFF == 0 else ""
            raise self.error("the version must be 2 or 3, in little-endian", str(version), f"Convert it anew.{big}")
        tensors = self._count("tensors", _MAX_TENSORS, 0)
        return tensors, self._count("keys", _MAX_KEYS, 13)

    def values(self, count: int) -> dict[str, Any]:
        """All keys; numbers, short strings and short arrays of numbers with their values."""
        values: dict[str, Any] = {}
        for i in range(count):
            self.where = f"key {i} of {count}"
            key = self._name("its name")
            self.where = shown(key)
            if key in values:
                raise self.error("every key must be given once", "a second one", _BROKEN)
            values[key] = self._value(self._number(_U32), 0)
        return values

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _NUMBERS:
            raise self.error("its type must be one of 0 to 12", str(kind), _BROKEN)
        return self._number(_NUMBERS[kind])

    def _string(self) -> Any:
        self._item()
        count = self._count("the bytes of a string", _MAX_STRING, 1)
        if count <= _MAX_NAME:
            return self._text(self._take(count))
        self._skip(count)
        return _NotKept(f"a string of {count} bytes")

    def _array(self, depth: int) -> tuple[Any, ...] | _NotKept:
        """A short array of numbers, which may say something of each layer; any other is passed over."""
        if depth >= _MAX_NESTING:
            raise self.error(f"arrays must be nested at most {_MAX_NESTING} deep", "more", _BROKEN)
        kind: int = self._number(_U32)
        if kind in _NUMBERS:
            form = _NUMBERS[kind]
            count = self._count("entries of an array", _MAX_ITEMS, form.size)
            if depth == 0 and count <= _MAX_KEPT:
                self._item(count)
                return struct.unpack(f"<{count}{form.format[-1]}", self._take(count * form.size))
            self._skip(count * form.size)
            return _NotKept(f"an array of {count}")
        if kind not in (_STRING, _ARRAY):
            raise self.error("its type must be one of 0 to 12", str(kind), _BROKEN)
        count = self._count("entries of an array", _MAX_ITEMS, 8)
        self._item(count)
        if kind == _STRING:
            self._skip_strings(count)
            return _NotKept(f"an array of {count}")
        self.arrays += count
        if self.arrays > _MAX_ARRAYS:
            raise self.error(f"arrays inside arrays must be at most {_MAX_ARRAYS}", "more", _BROKEN)
        for _ in range(count):
            self._array(depth + 1)
        return _NotKept(f"an array of {count}")

    def _skip_strings(self, count: int) -> None:
        """Pass over strings, a block of the file at a time: a vocabulary has hundreds of thousands."""
        length = _U64.unpack_from
        while count:
            self._need(_U64.size)
            start = self.position
            block = self._take(min(_BLOCK, self.size - start, self.most - start))
            at, last = 0, len(block) - _U64.size
            while count and at <= last:
                size = length(block, at)[0]
                if size > _MAX_STRING:
                    raise self.error(f"the bytes of a string must be at most {_MAX_STRING}", str(size), _BROKEN)
                at += _U64.size + size
                count -= 1
            self.position = start
            self._need(at)
            self.position = start + at
            self.file.seek(self.position)

    def tensors(self, count: int) -> dict[str, _Tensor]:
        """Where the tensors of factors are."""
        names: set[str] = set()
        found: dict[str, _Tensor] = {}
        self._need(count * 24)
        for i in range(count):
            self.where = f"tensor {i} of {count}"
            name = self._name("its name")
            self.where = shown(name)
            if name in names:
                raise self.error("every tensor must be given once", "a second one", _BROKEN)
            names.add(name)
            axes = self._number(_U32)
            if axes > 4:
                raise self.error("a tensor must have at most 4 axes", str(axes), _BROKEN)
            *dims, kind, offset = struct.unpack(f"<{axes}QIQ", self._take(8 * axes + 12))
            if not name.startswith("rope"):
                continue
            if name not in (FREQS, SHORT, LONG):
                must = f"a tensor about rotation must be one of {FREQS}, {SHORT}, {LONG}"
                raise self.error(must, "another", "llama.cpp does not read it.")
            found[name] = _Tensor(tuple(dims), kind, offset)
        return found

    def floats(self, name: str, tensor: _Tensor, start: int) -> tuple[float, ...]:
        """The numbers of a tensor of factors; infinite where a pair stands still."""
        self.where = name
        most = MAX_HEAD_DIM // 2
        if tensor.kind != _F32 or len(tensor.dims) != 1 or not 1 <= tensor.dims[0] <= most:
            raise self.error(
                f"it must hold 1 to {most} numbers of type F32 on one axis",
                f"axes {shown(tensor.dims)} of type {tensor.kind}",
                "Convert the model anew.",
            )
        self.most = self.size  # the data of a tensor lies anywhere in the file
        self.position = min(start + tensor.offset, self.size)
        self.file.seek(self.position)
        values = struct.unpack(f"<{tensor.dims[0]}f", self._take(4 * tensor.dims[0]))
        return tuple(math.inf if value >= _NEVER_TURNS else value for value in values)
