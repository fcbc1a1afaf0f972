"""Kill conversions at random moments: no complete folder is left, and the last run gives the same result as one run."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import run, write_model

KILLS = 20

# A conversion that kills its own process at one of the calls of Python or C functions.
PROGRAM = """
import os, signal, sys, tempfile
from pathlib import Path
from ropewalk.tools import convert as checkpoints
from ropewalk.tools.convert import raw

source, target, to, form, last = sys.argv[1:]
raw.CHUNK = 512
left = int(last)

def count(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

if form == "meta":
    import torch  # whose calls are not counted
about = {"max_positions": 64} if Path(source, "params.json").exists() else {}
plan = checkpoints.plan(checkpoints.read(Path(source), **about), to, form)
with tempfile.TemporaryDirectory() as folder:  # once for all imports, whose calls are not counted
    checkpoints.write(plan, Path(folder, "warm"), lambda *_: None)
sys.setprofile(count)
checkpoints.write(plan, Path(target), lambda *_: None)
sys.setprofile(None)
print(int(last) - left)
"""


def convert(source: Path, target: Path, to: str, form: str, kill_at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), to, form, str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("form", "kills", "stages"), [("hf", KILLS, 3), ("meta", 4, 1)])
def test_killed(form: str, kills: int, stages: int, tmp_path: Path) -> None:
    source: Any = write_model(tmp_path / "a", shards=5)
    (source / "tokenizer.json").write_text("{}" * 1000)
    alone = convert(source, tmp_path / "alone", "interleaved", form, -1)
    assert alone.returncode == 0, alone.stderr
    calls, expected = int(alone.stdout), contents(tmp_path / "alone")
    drawn, killed, moments = random.Random(0), 0, set()
    target = tmp_path / "b"
    while killed < kills:
        ran = convert(source, target, "interleaved", form, drawn.randint(1, calls))
        if target.exists():  # the run ended before it was killed
            assert contents(target) == expected
            shutil.rmtree(target)
        if ran.returncode == 0:
            continue
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        killed += 1
        left = tmp_path / ".b.unfinished"
        moments.add(len(list(left.iterdir())) if left.exists() else 0)
    assert len(moments) >= stages  # the runs were killed at enough different stages
    assert convert(source, target, "interleaved", form, -1).returncode == 0
    assert contents(target) == expected
    assert {path.name for path in tmp_path.iterdir()} - {".b.lock"} == {"a", "alone", "b"}
    run(target, tmp_path / "c", "--to", "half", *(["--max-positions", 64] if form == "meta" else []))
