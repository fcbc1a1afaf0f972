"""Read Meta's consolidated.*.pth: find the tensors in the files, and join their pieces.

The format is that of torch.save: an uncompressed zip archive, in which one member is a pickle of the names and shapes,
and each other member is the content of a storage. This module reads the directory of the archive and the pickle itself,
without calling anything that the pickle names.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk.tools.convert import raw
from ropewalk.tools.convert.layouts import MAX_NAME
from ropewalk.tools.convert.meta import DTYPES
from ropewalk.tools.convert.raw import StoredTensor, Tensor

NAME = re.compile(r"consolidated\.(\d{2,})\.pth")
_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
_DTYPES_BY_STORAGE = {f"torch {name}": dtype for dtype, name in _STORAGES.items()}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LARGEST_READ = 2**20
"""The largest directory of an archive, and the largest pickle, in bytes. Those of Llama 3.1 405B have about 2**17."""

# Meta's code splits these tensors by rows or by columns. Every file contains the other tensors completely.
_BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
_BY_COLUMNS = ("wo", "w2")


def pieces(folder: Path) -> list[Path]:
    """Return the files consolidated.00.pth, consolidated.01.pth, ... of a folder, in order.

    Raises:
        RopeError: there are no such files, or one is missing.
    """
    paths = sorted(path for path in folder.glob("consolidated.*.pth") if NAME.fullmatch(path.name) and path.is_file())
    numbers = [int(NAME.fullmatch(path.name)[1]) for path in paths]  # type: ignore[index]
    if numbers != list(range(len(paths))) or not paths:
        came = ", ".join(path.name for path in paths[:4]) or "none"
        must = f"{folder} must hold consolidated.00.pth and the files that follow it, without a gap"
        raise _checks.error("convert", must, came, "Download or copy the missing files.")
    return paths


class _BoundedFile(io.FileIO):
    """A file that never reads more than `_LARGEST_READ` bytes at once, whatever size the file states."""

    def read(self, size: int | None = -1, /) -> bytes:
        limit = _LARGEST_READ + 1
        content = super().read(limit if size is None or size < 0 else min(size, limit)) or b""
        if len(content) == limit:
            raise ValueError(f"its directory or its pickle has more than {_LARGEST_READ:,} bytes")
        return content


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Find the tensors of one file. Return them by name, without loading them.

    Raises:
        RopeError: the file cannot be read, or holds something other than contiguous floating-point tensors.
    """
    try:
        with _BoundedFile(file) as content:
            members = _members(content)

            def read(name: str) -> bytes:
                offset, nbytes = members[name]
                content.seek(offset)
                return content.read(nbytes)

            if "byteorder" in members and read("byteorder") != b"little":
                raise ValueError("it is big-endian")
            return {name: _tensor(file, name, saved, members) for name, saved in _unpickle(read("data.pkl")).items()}
    except _checks.RopeError:
        raise
    except Exception as e:  # a damaged archive or pickle can raise almost any error
        must = f"{file} must be a file that torch.save wrote, and contain only tensors"
        came = f"one that cannot be read ({type(e).__name__}: {str(e)[:200]})"
        fix = "Download it again, or save only its tensors: torch.save(torch.load(FILE, weights_only=True), FILE)."
        raise _checks.error("convert", must, came, fix) from e


def _members(content: io.FileIO) -> dict[str, tuple[int, int]]:
    """Return the offset and the size in bytes of each member of an archive, by its name without the outermost folder.

    Raises:
        ValueError, or an error of `zipfile`: these bytes of the file are not the content of the member.
    """
    members: dict[str, tuple[int, int]] = {}
    size = content.seek(0, io.SEEK_END)
    with zipfile.ZipFile(content) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
                raise ValueError(f"{member.filename} is compressed")
            with archive.open(member):  # this raises an error if the member is encrypted, or has no or another header
                begin = content.tell()
            name = member.filename.partition("/")[2]
            if name in members or begin + member.file_size > size:
                problem = "is there twice" if name in members else "extends beyond the end of the file"
                raise ValueError(f"{member.filename} {problem}")
            members[name] = begin, member.file_size
    return members


def _unpickle(content: bytes) -> dict[str, Any]:
    """Return the dict that torch.save pickled. Nothing that the pickle names is imported or called.

    A call becomes a tuple of the function's name and its arguments, but OrderedDict() becomes a dict, without its
    attributes. A reference to a storage becomes the tuple that torch.save wrote for it.

    Raises:
        ValueError, or an error of an invalid operation: this is not the pickle of a dict of tensors.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "BINPERSID" | "STOP":
                pass
            case "GLOBAL" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                begin = marks.pop()
                stack[begin:] = [tuple(stack[begin:])]
            case "SETITEM" | "SETITEMS":
                begin = marks.pop() if opcode.name == "SETITEMS" else len(stack) - 2
                items = stack[begin:]
                del stack[begin:]
                for key, value in zip(items[::2], items[1::2], strict=True):
                    if not isinstance(key, str) or len(key) > MAX_NAME:  # the hash of a tuple could take forever
                        raise ValueError(f"it has the key {_checks.shown(key)}")
                    stack[-1][key] = value
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "REDUCE":
                call = tuple(stack[-2:])
                stack[-2:] = [{} if call == ("collections OrderedDict", ()) else call]
            case "BUILD" if isinstance(stack[-2], dict):
                stack.pop()
            case _:
                raise ValueError(f"its pickle holds something other than tensors, with {opcode.name}")
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise ValueError("it does not hold a dict of tensors")
    return stack[0]


def _tensor(file: Path, name: str, saved: object, members: Mapping[str, tuple[int, int]]) -> StoredTensor:
    """Return the tensor that `_unpickle` found under a name.

    Raises:
        RopeError: it is something other than a contiguous floating-point tensor.
        ValueError or KeyError: the archive does not contain its bytes.
    """
    match saved:
        case "torch._utils _rebuild_parameter", (tensor, *_):
            saved = tensor
    match saved:
        case (
            "torch._utils _rebuild_tensor_v2",
            (
                ("storage", str(kind), str(key), _, int(count)),
                int(first),
                (int(),) | (int(), int()) as shape,
                strides,
                _,
                _,
            ),
        ) if kind in _DTYPES_BY_STORAGE and strides == (*shape[1:], 1):
            dtype = _DTYPES_BY_STORAGE[kind]
        case _:
            must = f"{name} of {file.name} must be a contiguous vector or matrix of {', '.join(DTYPES.values())}"
            raise _checks.error("convert", must, _checks.shown(saved), "Convert or remove it, and save the file again.")
    offset, nbytes = members[f"data/{key}"]
    width, elements = _SIZES[dtype], math.prod(shape)
    if nbytes != count * width:
        raise ValueError(f"data/{key} has {nbytes:,} bytes instead of {count * width:,}")
    if first < 0 or min(shape) < 1 or first + elements > count:
        raise ValueError(f"{name} is empty or extends beyond data/{key}")
    return raw.tensor_in_file(file, offset + first * width, elements * width, dtype, tuple(shape))


def join_pieces(files: list[dict[str, StoredTensor]], width: int) -> dict[str, Tensor]:
    """Join the pieces of the tensors of a model that is split over several files, one for each GPU.

    Args:
        files: the tensors of each file.
        width: the number of channels of the model, which shows whether the embedding was split by rows or by columns.

    Raises:
        RopeError: the files hold different tensors, or the pieces of a tensor do not fit together.
    """
    for other in files[1:]:
        if different := sorted(other.keys() ^ files[0].keys()):
            must = "all consolidated files must hold pieces of the same tensors"
            raise _checks.error("convert", must, f"{different[0]} in only some of them", "Download or copy them again.")
    return {name: _join_tensor(name, [tensors[name] for tensors in files], width) for name in files[0]}


def _join_tensor(name: str, pieces: list[StoredTensor], width: int) -> Tensor:
    """Join the pieces of one tensor, or return the first piece if each file has the complete tensor."""
    kind = name.split(".")[-2] if name.endswith(".weight") else name
    first = pieces[0]
    if any(part.shape != first.shape or part.dtype != first.dtype for part in pieces):
        must = f"the pieces of {name} must have one shape and dtype"
        came = ", ".join(str(p.shape) for p in pieces[:4])
        raise _checks.error("convert", must, came, "Use files that belong to one model.")
    if len(pieces) == 1:
        return first
    if len(first.shape) == 2:
        if kind in _BY_ROWS or (kind == "tok_embeddings" and first.shape[1] == width):
            return raw.join(pieces, 0)
        if kind in _BY_COLUMNS or (kind == "tok_embeddings" and first.shape[1] * len(pieces) == width):
            return raw.join(pieces, 1)
    if len(first.shape) == 1 and (kind.endswith("norm") or name == "rope.freqs"):
        return first
    must = f"{name} must be a tensor of Meta's Llama, whose pieces can be joined"
    came = f"{len(pieces)} pieces of shape {first.shape}"
    raise _checks.error("convert", must, came, "Join the files into one first.")
