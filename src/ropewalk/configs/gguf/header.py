"""Parse the header of a GGUF file: the keys with numbers, short strings or short lists, and the factor tensors.

A factor tensor holds a divisor of the frequency of each pair. All other values are skipped. The gguf package is not
used, because it loops over any count that a header claims. This module checks every length against the file size first.
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

_NO_ROTATION = 1e30  # the factor that converters write for a pair that does not rotate
# Bounds far above any model, which limit the time and memory that a corrupt file can take.
_MAX_KEYS = 10_000
_MAX_TENSORS = 65_536
_MAX_ITEMS = 2**21  # entries of an array, and strings, keys and tensors of a file: at most 800,000 in large models
_MAX_BYTES = 2**28  # bytes of the header: about 20 MiB with a vocabulary of 262,144
_MAX_STRING = 2**26
_MAX_NAME = 256  # bytes of the name of a key or tensor, and of a string value that is not skipped
_MAX_KEPT = 512  # entries of an array that is not skipped: llama.cpp supports at most 512 layers
_MAX_ALIGNMENT = 2**20

_STRING, _ARRAY, _F32 = 8, 9, 0
_BROKEN = "The file seems to be corrupt; download or convert it again."
_NUMBERS = {
    code: struct.Struct(f"<{letter}")
    for code, letter in ((0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"), (7, "?"), (10, "Q"),
                         (11, "q"), (12, "d"))
}  # fmt: skip
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_BLOCK = 2**18  # bytes to read at once while a list of strings is skipped


@dataclasses.dataclass(frozen=True)
class _SkippedValue:
    """The placeholder of a skipped value. Its repr describes the value in messages."""

    description: str

    def __repr__(self) -> str:
        return self.description


@dataclasses.dataclass(frozen=True)
class _Tensor:
    dims: tuple[int, ...]
    kind: int
    offset: int


def read(path: Path) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """Read the header of a file. Return a dict of its keys, and the numbers of its factor tensors by name.

    Raises:
        RopeError: the file does not exist, or is not a valid GGUF file.
    """
    if not path.is_file():
        raise error(str(path), "the model must be an existing file", "no such file", "Check the path.")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise error(str(path), "the model must be a regular file", "another kind of file", "Check the path.")
        parser = _HeaderParser(file, status.st_size, str(path))
        tensor_count, key_count = parser.counts()
        values = parser.values(key_count)
        infos = parser.tensors(tensor_count)
        start = _data_start(parser.position, values, str(path))
        return values, {name: parser.floats(name, info, start) for name, info in infos.items()}


def _data_start(position: int, values: dict[str, Any], source: str) -> int:
    alignment = values.get("general.alignment", 32)
    alignment = integer(source, "general.alignment", alignment, at_least=1, at_most=_MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise error(source, "general.alignment must be a power of 2", str(alignment), "Convert the model again.")
    return -(-position // alignment) * alignment


class _HeaderParser:
    """A parser that reads the header of a file from front to back.

    Attributes:
        file: the open file.
        size: its size in bytes.
        limit: the position in bytes up to which it may be read.
        source: the name of the file for messages.
        position: the current position in bytes.
        items: the number of keys, tensors, strings and array entries so far, without the entries of skipped arrays of
            numbers.
        where: the part of the header that is being read, for messages.
    """

    def __init__(self, file: BinaryIO, size: int, source: str) -> None:
        self.file = file
        self.size = size
        self.limit = _MAX_BYTES
        self.source = source
        self.position = 0
        self.items = 0
        self.where = "the header"

    def error(self, must: str, got: str, fix: str = "Check that the file is complete.") -> RopeError:
        """Return an error that names the file and the part that is being read."""
        return error(f"{self.source}: {self.where}", must, got, fix)

    def _check_remaining(self, count: int) -> None:
        if count > self.size - self.position:
            raise self.error(f"the file must have {shown(count)} more bytes", f"only {self.size - self.position}")
        if self.position + count > self.limit:
            raise self.error(
                f"the header must have at most {self.limit} bytes", "more", "Pass the GGUF file of a model."
            )

    def _read_bytes(self, count: int) -> bytes:
        self._check_remaining(count)
        content = self.file.read(count)
        if len(content) < count:
            raise self.error("the file must not change while it is read", "fewer bytes")
        self.position += count
        return content

    def _skip(self, count: int) -> None:
        self._check_remaining(count)
        self.file.seek(count, os.SEEK_CUR)
        self.position += count

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._read_bytes(form.size))[0]

    def _count(self, name: str, limit: int, least_bytes: int) -> int:
        count: int = self._number(_U64)
        if count > limit:
            raise self.error(f"{name} must be at most {limit}", str(count), _BROKEN)
        self._check_remaining(count * least_bytes)
        return count

    def _count_items(self, count: int = 1) -> None:
        self.items += count
        if self.items > _MAX_ITEMS:
            raise self.error(
                f"the file must have at most {_MAX_ITEMS} keys, strings and tensors",
                "more",
                "Pass the GGUF file of a model.",
            )

    def _name(self, name: str) -> str:
        self._count_items()
        return self._text(self._read_bytes(self._count(f"the length of {name}", _MAX_NAME, 1)))

    def _text(self, content: bytes) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("strings must be UTF-8", shown(content), _BROKEN) from None

    def counts(self) -> tuple[int, int]:
        """Return the number of tensors and the number of keys."""
        magic = self._read_bytes(4)
        if magic != MAGIC:
            raise self.error(f"the file must begin with {MAGIC!r}", shown(magic), "Pass a GGUF file.")
        version: int = self._number(_U32)
        if version not in (2, 3):
            hint = " It seems to be big-endian." if version & 0xFFFF == 0 else ""
            must = "the version must be 2 or 3, in little-endian"
            raise self.error(must, str(version), f"Convert the model again.{hint}")
        tensors = self._count("the number of tensors", _MAX_TENSORS, 0)
        return tensors, self._count("the number of keys", _MAX_KEYS, 13)

    def values(self, count: int) -> dict[str, Any]:
        """Read `count` keys. Return a dict from each key to its value, or to a `_SkippedValue`."""
        values: dict[str, Any] = {}
        for i in range(count):
            self.where = f"key {i} of {count}"
            key = self._name("its name")
            self.where = shown(key)
            if key in values:
                raise self.error("keys must be unique", "the key twice", _BROKEN)
            values[key] = self._value(self._number(_U32))
        return values

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise self.error("the type must be 0 to 12", str(kind), _BROKEN)
        return self._number(_NUMBERS[kind])

    def _string(self) -> Any:
        self._count_items()
        count = self._count("the length of a string", _MAX_STRING, 1)
        if count <= _MAX_NAME:
            return self._text(self._read_bytes(count))
        self._skip(count)
        return _SkippedValue(f"a string of {count} bytes")

    def _array(self) -> tuple[Any, ...] | _SkippedValue:
        """Return the values of an array if it is a short array of numbers. Otherwise skip the array."""
        kind: int = self._number(_U32)
        if kind in _NUMBERS:
            form = _NUMBERS[kind]
            count = self._count("the number of array entries", _MAX_ITEMS, form.size)
            if count <= _MAX_KEPT:
                self._count_items(count)
                return struct.unpack(f"<{count}{form.format[-1]}", self._read_bytes(count * form.size))
            self._skip(count * form.size)
            return _SkippedValue(f"an array of {count}")
        if kind != _STRING:
            raise self.error("an array must hold numbers or strings, as in llama.cpp", f"type {kind}", _BROKEN)
        count = self._count("the number of array entries", _MAX_ITEMS, 8)
        self._count_items(count)
        self._skip_strings(count)
        return _SkippedValue(f"an array of {count}")

    def _skip_strings(self, count: int) -> None:
        """Skip `count` strings, such as the hundreds of thousands of a vocabulary, by reading the file in blocks."""
        length = _U64.unpack_from
        while count:
            self._check_remaining(_U64.size)
            start = self.position
            block = self._read_bytes(min(_BLOCK, self.size - start, self.limit - start))
            at, last = 0, len(block) - _U64.size
            while count and at <= last:
                size = length(block, at)[0]
                if size > _MAX_STRING:
                    raise self.error(f"the length of a string must be at most {_MAX_STRING}", str(size), _BROKEN)
                at += _U64.size + size
                count -= 1
            self.position = start
            self._check_remaining(at)
            self.position = start + at
            self.file.seek(self.position)

    def tensors(self, count: int) -> dict[str, _Tensor]:
        """Read the descriptions of `count` tensors. Return the shape, type and offset of each factor tensor."""
        names: set[str] = set()
        factor_tensors: dict[str, _Tensor] = {}
        self._check_remaining(count * 24)
        for i in range(count):
            self.where = f"tensor {i} of {count}"
            name = self._name("its name")
            self.where = shown(name)
            if name in names:
                raise self.error("names of tensors must be unique", "the name twice", _BROKEN)
            names.add(name)
            axes = self._number(_U32)
            if axes > 4:
                raise self.error("a tensor must have at most 4 axes", str(axes), _BROKEN)
            *dims, kind, offset = struct.unpack(f"<{axes}QIQ", self._read_bytes(8 * axes + 12))
            if not name.startswith("rope"):
                continue
            if name not in (FREQS, SHORT, LONG):
                must = f"a tensor about rotation must be one of {FREQS}, {SHORT}, {LONG}"
                raise self.error(must, "another one", "llama.cpp does not read it. Convert the model again.")
            factor_tensors[name] = _Tensor(tuple(dims), kind, offset)
        return factor_tensors

    def floats(self, name: str, tensor: _Tensor, start: int) -> tuple[float, ...]:
        """Read the numbers of a factor tensor. The factor of a pair that does not rotate is infinity."""
        self.where = name
        limit = MAX_HEAD_DIM // 2
        if tensor.kind != _F32 or len(tensor.dims) != 1 or not 1 <= tensor.dims[0] <= limit:
            raise self.error(
                f"the tensor must hold 1 to {limit} numbers of type F32 on one axis",
                f"axes {shown(tensor.dims)} of type {tensor.kind}",
                "Convert the model again.",
            )
        self.limit = self.size  # the data of a tensor may be anywhere in the file
        self.position = min(start + tensor.offset, self.size)
        self.file.seek(self.position)
        values = struct.unpack(f"<{tensor.dims[0]}f", self._read_bytes(4 * tensor.dims[0]))
        return tuple(math.inf if value >= _NO_ROTATION else value for value in values)
