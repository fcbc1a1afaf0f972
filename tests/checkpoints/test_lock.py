"""Test locks: one writer at a time, errors that name the holder, and locks that end with their process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ropewalk import RopeError
from ropewalk.tools.convert.files import hold

HOLD = """
import sys
from pathlib import Path
from ropewalk.tools.convert.files import hold
with hold(Path(sys.argv[1]), "x"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds a lock until it is killed."""
    arguments = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            yield other
        finally:
            other.kill()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "lock"
    with holder(file) as other:
        message = (
            rf"convert: only one process may write x at a time, "
            rf"got process {other.pid} on {platform.node()}\. Wait until it has ended"
        )
        for _ in range(2):  # asking does not change who is named
            with pytest.raises(RopeError, match=message), hold(file, "x"):
                pass
        other.kill()
        other.wait()
        assert file.exists()  # it is still there, and holds nobody up
        with hold(file, "x"):
            pass
    assert list(file.parent.iterdir()) == []


def test_a_second_writer_in_one_process_is_refused(tmp_path: Path) -> None:
    file, message = tmp_path / "lock", rf"only one process may write x .*, got process {os.getpid()} on"
    with hold(file, "x"), pytest.raises(RopeError, match=message), hold(file, "x"):
        pass


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), hold(tmp_path / "lock", "x"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with hold(tmp_path / "lock", "x"):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_without_filelock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(RopeError, match=r"filelock must be installed\. Run pip install"):
        hold(tmp_path / "lock", "x").__enter__()
