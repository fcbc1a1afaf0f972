"""A folder that appears whole or not at all, and that a run which was killed goes on with.

All is written into a hidden folder beside the target, file by file under a name of its own until it is whole. That
folder is renamed at the end. The next run of the same conversion keeps the files that are whole; any other begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ropewalk import _checks, _lock
from ropewalk.checkpoints import pth, shards
from ropewalk.checkpoints.plan import Plan

_STATE = ".ropewalk.json"
Check = Callable[[Path], None]
Progress = Callable[[str, int, int], None]
"""Called with a file, the bytes done and all bytes."""


def check_target(plan: Plan, folder: Path) -> None:
    """Raise where the result cannot be written to a folder: it holds something, or is that of the source."""
    target, origin = folder.resolve(), plan.source.folder.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        must, cure = "DST must be a folder beside SRC", "Name a new one."
        raise _checks.error("convert", must, "SRC itself, or one in the other", cure)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        cure = "Name a new folder. Nothing that exists is replaced."
        raise _checks.error("convert", f"{folder} must not exist yet", "something that does", cure)
    above = next(path for path in target.parents if path.exists())
    free, needed = shutil.disk_usage(above).free + _kept(_unfinished(folder)), plan.nbytes
    if free < needed:
        must = f"{above} must have room for {needed:,} bytes"
        raise _checks.error("convert", must, f"{free:,}", "Make room, or name another folder.")


def write(plan: Plan, folder: Path, progress: Progress, check: Check | None = None) -> None:
    """Do what was planned.

    Args:
        plan: what to write.
        folder: new or empty; it appears at the end, with all files.
        progress: told how far it is.
        check: called with the unfinished folder when all is written; what it raises, and its folder goes.

    Raises:
        RopeError: the folder holds something; another process writes it; a disk is full; `check` refuses the result.
    """
    check_target(plan, folder)
    target = folder.resolve()
    unfinished = _unfinished(folder)
    with _lock.held("convert", target.with_name(f".{target.name}.lock"), str(folder)):
        try:
            _prepare(unfinished, _state(plan))
            _weights(plan, unfinished, progress)
            if check is not None:
                try:
                    check(unfinished)
                except _checks.RopeError:
                    shutil.rmtree(unfinished)
                    raise
            for name in plan.source.beside if plan.form == plan.source.form else ():
                _whole(unfinished / name, lambda new, name=name: _copy(plan.source.folder / name, new))  # type: ignore[misc]
            for name, content in plan.texts.items():
                text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                _whole(unfinished / name, lambda new, text=text: _text(new, text))  # type: ignore[misc]
            (unfinished / _STATE).unlink()
            if target.exists():
                target.rmdir()
            os.rename(unfinished, target)
        except OSError as e:
            must = f"{folder} must be a place where files can be written"
            cure = "Make room, or name another place; run the same again to go on."
            raise _checks.error("convert", must, e.strerror or str(e), cure) from e


def _unfinished(folder: Path) -> Path:
    target = folder.resolve()
    return target.with_name(f".{target.name}.unfinished")


def _kept(unfinished: Path) -> int:
    """Bytes that an earlier run has written, whether they are kept or make room."""
    return sum(path.stat().st_size for path in unfinished.glob("*") if path.is_file())


def _state(plan: Plan) -> str:
    """What must be the same for a run to go on with the files of another: the target, and the source as it stands."""
    described = [
        plan.to,
        plan.form,
        plan.texts,
        plan.metadata,
        [part for parts in plan.parts.values() for part in parts],
    ]
    stands = []
    for path in sorted(path for path in plan.source.folder.iterdir() if path.is_file()):
        about = path.stat()
        stands.append([path.name, about.st_size, about.st_mtime_ns])
    return hashlib.sha256(repr([described, stands, str(plan.source.folder.resolve())]).encode()).hexdigest()


def _prepare(unfinished: Path, state: str) -> None:
    """Keep what an earlier run of the same conversion left; anything else goes."""
    kept = unfinished / _STATE
    if not kept.is_file() or kept.read_text() != state:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        _whole(kept, lambda new: _text(new, state))
    for path in unfinished.glob("*.partial"):
        path.unlink()


def _weights(plan: Plan, unfinished: Path, progress: Progress) -> None:
    total, before = plan.nbytes, 0
    for file, tensors in plan.files.items():
        size = sum(tensor.nbytes for tensor in tensors.values())
        done = before

        def said(count: int, file: str = file) -> None:
            nonlocal done
            done += count
            progress(file, done, total)

        def one(new: Path) -> None:
            if plan.form == "meta":
                pth.write(new, tensors, said)  # noqa: B023
            else:
                shards.write(new, tensors, plan.metadata.get(file, {}), said)  # noqa: B023

        if not (unfinished / file).exists():
            _whole(unfinished / file, one)
        before += size
        progress(file, before, total)


def _whole(file: Path, make: Callable[[Path], None]) -> None:
    """Make a file under another name, and give it its own when it is on the disk."""
    partial = file.with_name(f"{file.name}.partial")
    make(partial)
    with partial.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(partial, file)


def _text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _copy(file: Path, new: Path) -> None:
    shutil.copyfile(file, new)
