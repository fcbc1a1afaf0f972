"""Files that are written whole or not at all, and safetensors files whose header is read before their tensors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ropewalk import _checks

LARGEST_HEADER = 2**22
"""Bytes. A model of the lab has some tens of thousands; one with a thousand layers stays below."""

_UNREADABLE = "Name another; one that a training has left may be deleted."


class Kind(NamedTuple):
    """dtype (in the words of safetensors, "F32") and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


@contextmanager
def writing(file: Path, unfinished: Path | None = None) -> Iterator[Path]:
    """Give a path to write to; what was written there then takes the place of `file` in one step.

    Whatever goes wrong, `file` stays as it was, and what was written so far is removed. A process that is killed
    leaves it behind.

    Args:
        file: its folder is made.
        unfinished: the path to give; `file` with the suffix `.unfinished` when None, which suits one writer at a time.

    Raises:
        RopeError: the file cannot be written: the disk is full, the folder is read-only.
    """
    unfinished = unfinished or file.with_name(f"{file.name}.unfinished")
    with _told(file):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            os.replace(unfinished, file)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise


@contextmanager
def new_file(who: str, file: Path, *, force: bool) -> Iterator[Path]:
    """As `writing`, for a file of the user's: one that exists is replaced only with `force`.

    Raises:
        RopeError: something is there, or the file cannot be written.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        raise _checks.error(who, f"{file} must be a file", "something else", "Name another.")
    if file.exists() and not force:
        raise _occupied(who, file, f"a file of {file.stat().st_size:,} bytes")
    with writing(file, _beside(file)) as unfinished:
        yield unfinished


@contextmanager
def new_folder(who: str, folder: Path, *, force: bool, replaceable: Collection[str]) -> Iterator[Path]:
    """Give a folder to write to, which then becomes `folder` in one step.

    Where a folder is replaced there are two steps: the old one is renamed to `<name>.old`, then the new one takes its
    place and the old one is deleted. A process killed between the two leaves the old folder whole under that name.

    Args:
        folder: may exist if it is empty, and with `force` if it holds nothing but files named in `replaceable`. It
            cannot be the current folder, which would be replaced under the feet of the shell, or a mount point.

    Raises:
        RopeError: something else is there, or the folder cannot be written.
    """
    folder = folder.resolve()
    old = folder.with_name(f"{folder.name}.old")
    there = _names(who, folder)
    if there and not force:
        raise _occupied(who, folder, f"a folder with {_listed(there)}")
    if folder.exists() and (folder == Path.cwd() or os.path.ismount(folder)):
        must = f"{folder} must be a folder that another can take the place of"
        came = "the current folder" if folder == Path.cwd() else "a mount point"
        raise _checks.error(who, must, came, "Name a new folder in it.")
    if others := sorted(name for name in there if name not in replaceable or not (folder / name).is_file()):
        must = f"a folder that --force replaces must hold nothing but {', '.join(replaceable)}"
        raise _checks.error(who, must, f"{folder} with {_listed(others)}", "Name another, or move those away.")
    if there and old.exists():
        must = f"{old} must not exist: what is in {folder} now is kept there for a moment"
        raise _checks.error(who, must, "one that does", "Is it left of an export that was killed? Rename or delete it.")
    unfinished = _beside(folder)
    with _told(folder):
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            if there:
                os.rename(folder, old)
            try:
                if folder.exists():
                    folder.rmdir()
                os.rename(unfinished, folder)
            except OSError as e:
                if there:
                    os.rename(old, folder)
                elif e.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                    raise _occupied(who, folder, f"a folder with {_listed(_names(who, folder))}") from e
                raise
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if there:
            shutil.rmtree(old)


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, with the permissions that the umask gives to every new file."""
    file.touch()
    mode = file.stat().st_mode
    _safetensors().save_file(tensors, file, metadata)  # makes a file of its own, which only its owner can read
    file.chmod(mode)


@contextmanager
def reading(file: Path) -> Iterator[tuple[Any, dict[str, str], dict[str, Kind]]]:
    """Open a safetensors file and read its header: the open file, its metadata, and the kind of every tensor.

    No tensor is read yet: `tensor` does that, when its kind was found to be as it must.

    Raises:
        RopeError: it is no safetensors file, or its header is larger than LARGEST_HEADER.
        OSError: it cannot be opened.
    """
    library = _safetensors()
    if file.exists() and not file.is_file():
        raise _checks.error("lab", f"{file} must be a safetensors file", "no regular file", _UNREADABLE)
    with file.open("rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if header > LARGEST_HEADER:
        must = f"{file} must be a safetensors file with a header of at most {LARGEST_HEADER:,} bytes"
        raise _checks.error("lab", must, f"one that is broken, or none ({header:,} bytes)", _UNREADABLE)
    try:
        with library.safe_open(file, "pt") as opened:
            names = list(opened.keys())
            parts = [opened.get_slice(name) for name in names]
            kinds = [Kind(str(part.get_dtype()), tuple(part.get_shape())) for part in parts]
            yield opened, opened.metadata() or {}, dict(zip(names, kinds, strict=True))
    except library.SafetensorError as e:
        must, came = f"{file} must be a safetensors file", f"one that is broken, or none ({e})"
        raise _checks.error("lab", must, came, _UNREADABLE) from e


def tensor(opened: Any, name: str) -> Tensor:
    """A copy of a tensor: what safetensors gives is the file itself, mapped, and Windows replaces no file that is."""
    read: Tensor = opened.get_tensor(name).clone()
    return read


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """An error of the system becomes one line that names what was to be written."""
    library = _safetensors()
    try:
        yield
    except (OSError, library.SafetensorError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        must = f"{path} must be a place where files can be written"
        cure = "Make room, or name another place. What was there before is unchanged."
        raise _checks.error("lab", must, reason, cure) from e


def _beside(path: Path) -> Path:
    """A name that nothing has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


def _names(who: str, folder: Path) -> list[str]:
    if folder.exists() and not folder.is_dir():
        raise _checks.error(who, f"{folder} must be a folder", "a file", "Name another.")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _occupied(who: str, path: Path, there: str) -> _checks.RopeError:
    return _checks.error(who, f"{path} must not exist yet", there, "Name another, or replace it with --force.")


class _Library(NamedTuple):
    safe_open: Any
    save_file: Any
    SafetensorError: Any


def _safetensors() -> _Library:
    try:
        import safetensors.torch
    except ImportError as e:
        raise _checks.error(
            "lab", "safetensors must be installed", "no such package", 'Run: pip install "ropewalk[lab]"'
        ) from e
    return _Library(safetensors.safe_open, safetensors.torch.save_file, safetensors.SafetensorError)
