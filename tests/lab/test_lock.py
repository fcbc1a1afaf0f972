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
import torch
from click.testing import CliRunner

import tiny_lab
from ropewalk import Rope, RopeError
from ropewalk.tools import cli
from ropewalk.tools._lock import hold
from ropewalk.tools.lab import study
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.study import Study
from ropewalk.tools.lab.train import Batch, Recipe, train

HOLD = """
import sys
from pathlib import Path
from ropewalk.tools._lock import hold
with hold("lab", Path(sys.argv[1]), "x"):
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


def batch(step: int) -> Batch:
    rows = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(step))
    return Batch(rows[:, :-1], rows[:, 1:])


def trained(file: Path, batch=batch) -> int:
    torch.manual_seed(0)
    model = LanguageModel(Size(16, 8, 12, 1, 2))
    return len(train(model, Rope(4, 1e4, "half"), batch, Recipe(3, 1e-2), file=file, about={}).losses)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "x.safetensors"
    with holder(tmp_path / "folder" / "x.safetensors.lock") as other:
        message = (
            rf"lab: only one process may write .*x\.safetensors at a time, "
            rf"got process {other.pid} on {platform.node()}\. Wait until it has ended"
        )
        for _ in range(2):  # asking does not change who is named
            with pytest.raises(RopeError, match=message):
                trained(file)
        assert not file.exists()
        other.kill()
        other.wait()
        assert (tmp_path / "folder" / "x.safetensors.lock").exists()  # it is still there, and holds nobody up
        assert trained(file) == 3
    assert [path.name for path in file.parent.iterdir()] == ["x.safetensors"]


def test_a_second_writer_in_one_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    refusals = []

    def twice(step: int) -> Batch:
        with pytest.raises(RopeError, match=rf"only one process may write .*, got process {os.getpid()} on") as e:
            trained(file)
        refusals.append(e)
        return batch(step)

    assert trained(file, twice) == len(refusals) == 3


def test_the_command_of_a_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "quick", lambda seed, baselines: Study([tiny_lab.COPY], [seed]))
    with holder(tmp_path / "lock") as other:
        ran = CliRunner().invoke(cli.main, ["lab", "--quick", "--out", str(tmp_path)])
        assert (ran.exit_code, ran.stdout) == (1, "")
        line = f"Error: lab: only one process may write in {tmp_path} at a time, got process {other.pid} on "
        assert ran.stderr.startswith(line)
        assert ran.stderr.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), hold("lab", tmp_path / "lock", "x"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with hold("lab", tmp_path / "lock", "x"):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_without_filelock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(RopeError, match=r"filelock must be installed\. Run pip install"):
        trained(tmp_path / "x")
