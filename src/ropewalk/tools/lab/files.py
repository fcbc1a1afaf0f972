"""Replace files and folders atomically, and read safetensors files after a check of their headers."""

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
"""Maximum size of a header in bytes. Lab models need tens of thousands of bytes. A thousand layers still fit."""

_UNREADABLE = "Pass another file. A broken file of a training may be deleted."


class Kind(NamedTuple):
    """The dtype (as named by safetensors, such as "F32") and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


@contextmanager
def atomic_write(file: Path, unfinished: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path, and replace `file` by the file that the body has written there.

    If the body raises, `file` does not change and the temporary file is removed. If the process is killed, `file` does
    not change either, but the temporary file remains.

    Args:
        file: the file to replace. Its folder is created.
        unfinished: the temporary path. None means `file` with the suffix `.unfinished`, which allows one writer at a
            time.

    Raises:
        RopeError: the file cannot be written, for example because the disk is full or the folder is read-only.
    """
    unfinished = unfinished or file.with_name(f"{file.name}.unfinished")
    with _convert_errors(file):
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
    """Yield a temporary path as `atomic_write` does, but replace an existing file only with `force`.

    Raises:
        RopeError: the file exists, or cannot be written.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        raise _checks.error(who, f"{file} must be a file", "something else", "Pass another path.")
    if file.exists() and not force:
        raise _exists_error(who, file, f"a file of {file.stat().st_size:,} bytes")
    with atomic_write(file, _temporary_path(file)) as unfinished:
        yield unfinished


@contextmanager
def new_folder(who: str, folder: Path, *, force: bool, replaceable: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `folder` after the body has written its files there.

    An existing folder is first renamed to `<name>.old`, and deleted at the end. If the process is killed in between,
    the old folder still exists under that name, complete.

    Args:
        who: the context of error messages.
        folder: the folder. It may exist if it is empty or, with `force`, if it contains only files named in
            `replaceable`. It must not be the current folder or a mount point.
        force: whether to replace an existing folder.
        replaceable: names of files that may be replaced.

    Raises:
        RopeError: the folder has other content, or cannot be written.
    """
    folder = folder.resolve()
    old = folder.with_name(f"{folder.name}.old")
    existing = _names(who, folder)
    if existing and not force:
        raise _exists_error(who, folder, f"a folder with {_list_names(existing)}")
    if folder.exists() and (folder == Path.cwd() or os.path.ismount(folder)):
        must = f"{folder} must be a folder that can be replaced"
        got = "the current folder" if folder == Path.cwd() else "a mount point"
        raise _checks.error(who, must, got, "Pass a new folder inside it.")
    if unexpected := sorted(name for name in existing if name not in replaceable or not (folder / name).is_file()):
        must = f"a folder that --force replaces must contain nothing but {', '.join(replaceable)}"
        raise _checks.error(
            who, must, f"{folder} with {_list_names(unexpected)}", "Pass another folder, or move these files away."
        )
    if existing and old.exists():
        must = f"{old} must not exist, because {folder} is renamed to it while it is replaced"
        raise _checks.error(who, must, "an existing folder", "A killed export may have left it. Rename or delete it.")
    unfinished = _temporary_path(folder)
    with _convert_errors(folder):
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            if existing:
                os.rename(folder, old)
            try:
                if folder.exists():
                    folder.rmdir()
                os.rename(unfinished, folder)
            except OSError as e:
                if existing:
                    os.rename(old, folder)
                elif e.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process created it first
                    raise _exists_error(who, folder, f"a folder with {_list_names(_names(who, folder))}") from e
                raise
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if existing:
            shutil.rmtree(old)


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that the umask gives to a new file."""
    file.touch()
    mode = file.stat().st_mode
    load_safetensors().save_file(tensors, file, metadata)  # the file is now readable by its owner only
    file.chmod(mode)


@contextmanager
def open_safetensors(file: Path) -> Iterator[tuple[Any, dict[str, str], dict[str, Kind]]]:
    """Open a safetensors file, and yield the open file, its metadata, and a dict from tensor names to `Kind`.

    Only the header is read here. Check the kinds, and then read the tensors with `read_tensor`.

    Raises:
        RopeError: the file is not a safetensors file, or its header is larger than LARGEST_HEADER.
        OSError: the file cannot be opened.
    """
    library = load_safetensors()
    if file.exists() and not file.is_file():
        raise _checks.error("lab", f"{file} must be a safetensors file", "something that is not a file", _UNREADABLE)
    with file.open("rb") as raw:
        header = int.from_bytes(raw.read(8), "little")
    if header > LARGEST_HEADER:
        must = f"{file} must be a safetensors file with a header of at most {LARGEST_HEADER:,} bytes"
        raise _checks.error(
            "lab", must, f"a broken file, or another format (its header claims {header:,} bytes)", _UNREADABLE
        )
    try:
        with library.safe_open(file, "pt") as opened:
            names = list(opened.keys())
            parts = [opened.get_slice(name) for name in names]
            kinds = [Kind(str(part.get_dtype()), tuple(part.get_shape())) for part in parts]
            yield opened, opened.metadata() or {}, dict(zip(names, kinds, strict=True))
    except library.SafetensorError as e:
        got = f"a broken file, or another format ({e})"
        raise _checks.error("lab", f"{file} must be a safetensors file", got, _UNREADABLE) from e


def read_tensor(opened: Any, name: str) -> Tensor:
    """Read a tensor into memory of its own. safetensors maps the file, and Windows cannot replace a mapped file."""
    read: Tensor = opened.get_tensor(name).clone()
    return read


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Convert errors of the operating system and of safetensors to a RopeError that names the path."""
    library = load_safetensors()
    try:
        yield
    except (OSError, library.SafetensorError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        must = f"{path} must be writable"
        fix = "Free disk space, or pass another path. Existing files are unchanged."
        raise _checks.error("lab", must, reason, fix) from e


def _temporary_path(path: Path) -> Path:
    """Return an unused hidden path in the folder of `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


def _names(who: str, folder: Path) -> list[str]:
    if folder.exists() and not folder.is_dir():
        raise _checks.error(who, f"{folder} must be a folder", "a file", "Pass another path.")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _exists_error(who: str, path: Path, content: str) -> _checks.RopeError:
    return _checks.error(who, f"{path} must not exist yet", content, "Pass another path, or replace it with --force.")


class _Library(NamedTuple):
    safe_open: Any
    save_file: Any
    SafetensorError: Any


def load_safetensors() -> _Library:
    """Return the functions of safetensors that the lab uses.

    Raises:
        RopeError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as e:
        raise _checks.missing_package("lab", "safetensors", "lab") from e
    return _Library(safetensors.safe_open, safetensors.torch.save_file, safetensors.SafetensorError)
