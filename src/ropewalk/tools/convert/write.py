"""Write a converted checkpoint to a folder that appears only when it is complete, and continue a run that was killed.

The files are written into a hidden folder next to the target, each under a temporary name until it is complete. At the
end the hidden folder is renamed to the target. If a run is killed, the next run of the same conversion keeps the files
that are complete. A run of another conversion deletes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ropewalk import _checks
from ropewalk.tools.convert import shards
from ropewalk.tools.convert.files import hold, replaced
from ropewalk.tools.convert.plan import Plan

_STATE = ".ropewalk.json"
Check = Callable[[Path], None]
Progress = Callable[[str, int, int], None]
"""A function of the name of a file, the number of bytes written so far in all files, and the number to write."""


def check_target(plan: Plan, folder: Path) -> None:
    """Raise a RopeError if the target is not a new or empty folder, overlaps the source, or lacks free space."""
    target, origin = folder.resolve(), plan.source.folder.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        must, came = "DST must be a folder outside of SRC that does not contain SRC", "folders that overlap"
        raise _checks.error("convert", must, came, "Pass a new folder.")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        fix = "Pass a new folder, because existing files are never replaced."
        raise _checks.error("convert", f"{folder} must not exist yet", "an existing file or folder", fix)
    above = next(path for path in target.parents if path.exists())
    # What an earlier run has written counts as free, because this run keeps it or deletes it.
    written = sum(path.stat().st_size for path in _hidden_folder(folder).glob("*") if path.is_file())
    free, needed = shutil.disk_usage(above).free + written, plan.nbytes
    if free < needed:
        must = f"{above} must have {needed:,} bytes of free space"
        raise _checks.error("convert", must, f"{free:,}", "Free some space, or pass another folder.")


def write(plan: Plan, folder: Path, progress: Progress, check: Check | None = None) -> None:
    """Write the result of a plan.

    Args:
        plan: the plan.
        folder: a new or empty folder. It appears at the end, with all files.
        progress: a function that is called after each chunk, with the arguments that `Progress` describes.
        check: a function that is called with the hidden folder after the weights have been written. If it raises a
            RopeError, the hidden folder is deleted.

    Raises:
        RopeError: as in `check_target`, or another process is writing to the folder, the folder cannot be written
            (e.g. because the disk is full), or `check` raises an error.
    """
    check_target(plan, folder)
    target = folder.resolve()
    unfinished = _hidden_folder(folder)
    with hold(target.with_name(f".{target.name}.lock"), str(folder)):
        try:
            _prepare(unfinished, _state(plan))
            _write_weights(plan, unfinished, progress)
            if check is not None:
                try:
                    check(unfinished)
                except _checks.RopeError:
                    shutil.rmtree(unfinished)
                    raise
            for name in plan.source.companion_files if plan.source.form != "meta" else ():
                _write_file(unfinished / name, lambda new, name=name: shutil.copyfile(plan.source.folder / name, new))  # type: ignore[misc]
            for name, content in plan.texts.items():
                text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                _write_file(unfinished / name, lambda new, text=text: _write_text(new, text))  # type: ignore[misc]
            (unfinished / _STATE).unlink()
            if target.exists():
                target.rmdir()
            os.rename(unfinished, target)
        except OSError as e:
            must = f"{folder} must be writable"
            fix = "Free some space and run the same command again to continue, or pass another folder."
            raise _checks.error("convert", must, e.strerror or str(e), fix) from e


def _hidden_folder(folder: Path) -> Path:
    target = folder.resolve()
    return target.with_name(f".{target.name}.unfinished")


def _state(plan: Plan) -> str:
    """Return a hash of the plan and of the source's files. A run continues an earlier run only if the hashes agree."""
    plan_values = [
        plan.to,
        plan.texts,
        plan.metadata,
        [part for parts in plan.parts.values() for part in parts],
    ]
    files = []
    for path in sorted(path for path in plan.source.folder.iterdir() if path.is_file()):
        status = path.stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(repr([plan_values, files, str(plan.source.folder.resolve())]).encode()).hexdigest()


def _prepare(unfinished: Path, state: str) -> None:
    """Prepare the hidden folder: keep the complete files of an earlier run of the same conversion, and no others."""
    kept = unfinished / _STATE
    if not kept.is_file() or kept.read_text() != state:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        _write_file(kept, lambda new: _write_text(new, state))
    for path in unfinished.glob("*.partial"):
        path.unlink()


def _write_weights(plan: Plan, unfinished: Path, progress: Progress) -> None:
    total, before = plan.nbytes, 0
    for file, tensors in plan.files.items():
        size = sum(tensor.nbytes for tensor in tensors.values())
        done = before

        def report(count: int, file: str = file) -> None:
            nonlocal done
            done += count
            progress(file, done, total)

        def make(new: Path) -> None:
            shards.write(new, tensors, plan.metadata.get(file, {}), report)  # noqa: B023

        if not (unfinished / file).exists():
            _write_file(unfinished / file, make)
        before += size
        progress(file, before, total)


def _write_file(file: Path, make: Callable[[Path], None]) -> None:
    """Write a file with `make`. It appears when it is complete and flushed to the disk."""
    with replaced(file) as new:
        make(new)
        with new.open("rb+") as written:
            os.fsync(written.fileno())


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON escapes lone surrogates in the same way
