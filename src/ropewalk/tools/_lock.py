"""A file lock that allows one writer at a time. The operating system releases it when the writer's process ends."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropewalk import _checks


@contextmanager
def hold(who: str, file: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file while the body runs.

    The system releases the lock when the process ends, even if it is killed, so a stale lock file has no effect. The
    lock file contains the process number and the host of the holder. Its folder is created if necessary.

    Args:
        who: the context of error messages.
        file: the lock file. It is removed when the body ends.
        what: what the lock protects, for the error message.

    Raises:
        RopeError: another process or another thread of this process holds the lock; filelock is not installed; or the
            lock file cannot be created.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as e:
        raise _checks.missing_package(who, "filelock", "convert") from e
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as e:
        fix = "Wait until it has ended, or choose another folder."
        raise _checks.error(who, f"only one process may write {what} at a time", _holder(file), fix) from e
    except OSError as e:
        must = f"{file.parent} must be a folder where files can be written"
        raise _checks.error(who, must, e.strerror or str(e), "Choose another folder.") from e
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
