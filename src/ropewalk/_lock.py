"""One writer at a time: a lock of the operating system, which ends with the process that holds it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropewalk import _checks


@contextmanager
def held(who: str, file: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file while the body runs.

    The system frees the lock however the process ends, so a lock file that a killed process has left locks nothing.
    The file says who holds it. Its folder is made.

    Args:
        who: who speaks in messages.
        file: the lock file; removed afterwards.
        what: what it protects, for the message.

    Raises:
        RopeError: another process, or another thread of this one, holds it; filelock is missing; the file cannot be
            written.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as e:
        raise _checks.error(
            who, "filelock must be installed", "no such package", 'Run: pip install "ropewalk[lab]"'
        ) from e
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as e:
        cure = "Wait until it has ended, or name another folder."
        raise _checks.error(who, f"only one process may write {what} at a time", _holder(file), cure) from e
    except OSError as e:
        must = f"{file.parent} must be a folder where files can be written"
        raise _checks.error(who, must, e.strerror or str(e), "Name another.") from e
    try:
        with suppress(OSError):  # a full disk: then the message names nobody
            file.write_text(f"process {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            file.unlink()
        lock.release()


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()[:200] or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"
