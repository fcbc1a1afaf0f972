"""Kill conversions at random moments: no complete folder is left, and the last run gives the same result as one run."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoint_files import run, write_model

# For each line "FOLDER NUMBER" of its input, converts into a folder in a child that kills itself at that call of a
# Python or C function, and prints how the child ended and the number of calls.
PROGRAM = """
import os, signal, sys, tempfile
from pathlib import Path
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert import raw

source, to = sys.argv[1:]
raw.CHUNK = 512
plan = checkpoints.plan(checkpoints.read(Path(source)), to)
with tempfile.TemporaryDirectory() as folder:  # once for all imports, whose calls are not counted
    checkpoints.write(plan, Path(folder, "warm"), lambda *_: None)
calls = 0
for line in sys.stdin:
    target, last = line.split()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        def count(frame, event, argument):
            global calls
            calls += 1
            if calls == int(last):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        checkpoints.write(plan, Path(target), lambda *_: None)
        sys.setprofile(None)
        os.write(writing, str(calls).encode())
        os._exit(0)
    os.close(writing)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.read(reading, 20).decode() or 0, flush=True)
    os.close(reading)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_killed(tmp_path: Path) -> None:
    source: Any = write_model(tmp_path / "a", shards=5)
    (source / "tokenizer.json").write_text("{}" * 1000)
    command = [sys.executable, "-c", PROGRAM, str(source), "interleaved"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:

        def convert(target: Path, kill_at: int) -> tuple[int, int]:
            """Return the exit status, and the number of calls of a complete conversion."""
            assert worker.stdin is not None
            assert worker.stdout is not None
            print(target, kill_at, file=worker.stdin, flush=True)
            status, calls = worker.stdout.readline().split()
            return int(status), int(calls)

        status, calls = convert(tmp_path / "alone", -1)
        assert status == 0
        expected, target = contents(tmp_path / "alone"), tmp_path / "b"
        drawn, killed, moments = random.Random(0), 0, set()
        while killed < 20:
            status, _ = convert(target, drawn.randint(1, calls))
            if target.exists():  # the run ended before it was killed
                assert contents(target) == expected
                shutil.rmtree(target)
            if status == 0:
                continue
            assert status == -signal.SIGKILL
            killed += 1
            left = tmp_path / ".b.unfinished"
            moments.add(len(list(left.iterdir())) if left.exists() else 0)
        assert len(moments) >= 3  # the runs were killed at enough different stages
        assert convert(target, -1)[0] == 0
    assert contents(target) == expected
    assert {path.name for path in tmp_path.iterdir()} - {".b.lock"} == {"a", "alone", "b"}
    run(target, tmp_path / "c", "--to", "half")
