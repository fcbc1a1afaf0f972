"""Write files: one writer at a time, and a file is replaced only when its new content is complete."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropewalk import _checks


@contextmanager
def hold(file: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file while the body runs. The file names the process and its host, and is removed at the end.

    The system releases the lock when the process ends, even if it is killed, so a stale lock file has no effect. The
    folder of the file is created if necessary. `what` says in error messages what the lock protects.

    Raises:
        RopeError: another process or another thread of this process holds the lock; filelock is not installed; or the
            lock file cannot be created.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as e:
        raise _checks.missing_package("convert", "filelock", "convert") from e
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as e:
        fix = "Wait until it has ended, or choose another folder."
        raise _checks.error("convert", f"only one process may write {what} at a time", _holder(file), fix) from e
    except OSError as e:
        must = f"{file.parent} must be a folder where files can be written"
        raise _checks.error("convert", must, e.strerror or str(e), "Choose another folder.") from e
    try:
        with suppress(OSError):  # on a full disk, the file names no holder
            file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            file.unlink()
        lock.release()


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()[:200] or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and move what the body has written there to `file`, at once.

    If the body raises or the process is killed, `file` does not change. The temporary file of a killed process stays
    until the next call for this file. An OSError names the file, for example if the disk is full.
    """
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        os.replace(partial, file)
    except BaseException as e:
        with suppress(OSError):
            partial.unlink()
        if isinstance(e, OSError) and e.filename is None:  # a failed write does not say to which file
            e.filename = str(file)
        raise
