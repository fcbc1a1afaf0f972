"""Read and write Meta's consolidated.*.pth: find the tensors in the files, join their pieces, and write one file.

To read, PyTorch unpickles the names and shapes and memory-maps the file, which gives the offset of each tensor. To
write, this module produces PyTorch's own format, an uncompressed zip archive, from one tensor at a time.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk.checkpoints import raw
from ropewalk.checkpoints.raw import JoinedTensor, StoredTensor, Tensor

NAME = re.compile(r"consolidated\.(\d{2,})\.pth")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ALIGNED = 64
"""The alignment of the members of an archive of PyTorch, in bytes."""

# Meta's code splits these tensors by rows or by columns. Every file contains the other tensors completely.
_BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
_BY_COLUMNS = ("wo", "w2")


def pieces(folder: Path) -> list[Path]:
    """Return the files consolidated.00.pth, consolidated.01.pth, ... of a folder, in order.

    Raises:
        RopeError: there are no such files, or one is missing.
    """
    paths = sorted(path for path in folder.glob("consolidated.*.pth") if NAME.fullmatch(path.name))
    numbers = [int(NAME.fullmatch(path.name)[1]) for path in paths]  # type: ignore[index]
    if numbers != list(range(len(paths))) or not paths:
        came = ", ".join(path.name for path in paths[:4]) or "none"
        must = f"{folder} must hold consolidated.00.pth and the files that follow it, without a gap"
        raise _checks.error("convert", must, came, "Download or copy the missing files.")
    return paths


def tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Find the tensors of one file. Return them by name, without loading them.

    Raises:
        RopeError: the file cannot be read, or holds something other than contiguous floating-point tensors.
    """
    import torch

    must = f"{file} must be a file that torch.save wrote, and contain only tensors"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        members = _members(file)
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError, OSError, KeyError, ValueError) as e:
        came = f"one that cannot be read ({str(e).strip().splitlines()[0][:200] if str(e) else type(e).__name__})"
        raise _checks.error("convert", must, came, "Download or copy it again.") from e
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise _checks.error("convert", must, _checks.shown(type(loaded)), "Save only the state_dict.")
    names = {getattr(torch, name): dtype for dtype, name in _DTYPES.items()}
    # The file is mapped as a whole, so distances in memory equal those in the file.
    mapped = sorted({tensor.untyped_storage().data_ptr() for tensor in loaded.values()})
    base = mapped[0] - members[0] if mapped and members else 0
    if [begin - base for begin in mapped] != members:
        must = f"{file} must be little-endian, and hold each storage of its tensors once"
        came = f"{len(members)} storages for {len(loaded)} tensors"
        raise _checks.error("convert", must, came, "Save it again with torch.save.")
    tensors = {}
    for name, tensor in loaded.items():
        dtype = names.get(tensor.dtype)
        if dtype is None or not tensor.is_contiguous():
            must = f"{name} of {file.name} must be a contiguous tensor of {', '.join(_DTYPES.values())}"
            came = f"{tensor.dtype} with strides {tensor.stride()}"
            raise _checks.error("convert", must, came, "Convert it, and save the file again.")
        nbytes = tensor.numel() * tensor.element_size()
        tensors[str(name)] = raw.tensor_in_file(file, tensor.data_ptr() - base, nbytes, dtype, tuple(tensor.shape))
    return tensors


def _members(file: Path) -> list[int]:
    """Return the sorted offsets in bytes of the storages in an archive of PyTorch, or [] if it is big-endian."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as content:
        begins = []
        for member in archive.infolist():
            if member.filename.endswith("/byteorder") and archive.read(member) != b"little":
                return []
            if "/data/" in member.filename:
                content.seek(member.header_offset + 26)
                lengths = content.read(4)
                name, extra = (int.from_bytes(length, "little") for length in (lengths[:2], lengths[2:]))
                begins.append(member.header_offset + 30 + name + extra)
    return sorted(begins)


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
            return JoinedTensor(tuple(pieces), 0)
        if kind in _BY_COLUMNS or (kind == "tok_embeddings" and first.shape[1] * len(pieces) == width):
            return JoinedTensor(tuple(pieces), 1)
    if len(first.shape) == 1 and (kind.endswith("norm") or name == "rope.freqs"):
        return first
    must = f"{name} must be a tensor of Meta's Llama, whose pieces can be joined"
    came = f"{len(pieces)} pieces of shape {first.shape}"
    raise _checks.error("convert", must, came, "Join the files into one first.")


class _Reference:
    """The reference to a storage in a pickle, which tells PyTorch where to find the bytes of a tensor."""

    def __init__(self, key: int, tensor: Tensor) -> None:
        self.key, self.tensor = key, tensor


class _Rebuilt:
    """A tensor in a pickle, in the form in which PyTorch writes contiguous tensors on the CPU."""

    def __init__(self, reference: _Reference) -> None:
        self._reference = reference

    def __reduce__(self) -> tuple[Any, ...]:
        from collections import OrderedDict

        import torch

        shape = self._reference.tensor.shape
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return torch._utils._rebuild_tensor_v2, (self._reference, 0, shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        if not isinstance(value, _Reference):
            return None
        import torch

        kind = getattr(torch, _STORAGES[value.tensor.dtype])
        return "storage", kind, str(value.key), "cpu", math.prod(value.tensor.shape)


def check(tensors: Mapping[str, Tensor]) -> None:
    """Raise a RopeError if a tensor has a dtype that Meta's format does not support."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORAGES:
            must = f"{name} must have one of the dtypes {', '.join(_DTYPES.values())} in Meta's format"
            raise _checks.error("convert", must, tensor.dtype, "Use --format hf.")


def write(file: Path, tensors: Mapping[str, Tensor], done: Callable[[int], None]) -> None:
    """Write a file that `torch.load(file, weights_only=True, mmap=True)` reads, with the tensors in their given order.

    Args:
        file: the file to create or overwrite.
        tensors: the tensors by name. They must pass `check`.
        done: a function that is called after each chunk, with its number of bytes.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, 2).dump({name: _Rebuilt(_Reference(k, t)) for k, (name, t) in enumerate(tensors.items())})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with _open_member(archive, name) as member:
                member.write(content)
        for key, tensor in enumerate(tensors.values()):
            with _open_member(archive, f"data/{key}", tensor.nbytes) as member:
                for chunk in raw.chunks(tensor):
                    member.write(chunk.data)
                    done(chunk.nbytes)


def _open_member(archive: zipfile.ZipFile, name: str, nbytes: int = 0) -> Any:
    """Open a member of the archive for writing, with padding that aligns its bytes to 64 as PyTorch does."""
    member = zipfile.ZipInfo(f"consolidated/{name}")  # with a fixed date, so that equal tensors give equal files
    member.file_size = nbytes
    large = nbytes > 2**31 - 2**20
    begin = archive.fp.tell() + 30 + len(member.filename) + (20 if large else 0) + 4  # type: ignore[union-attr]
    padding = -begin % _ALIGNED
    member.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(member, "w", force_zip64=large)
