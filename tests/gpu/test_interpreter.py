"""Run the tests of the GPU kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name", ["test_attend.py", "test_kernels.py", "test_step.py", "../attention/test_own_pages.py"]
)
def test_kernels_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, so nothing can interpret its kernels")
    tests = str(Path(__file__).parent / name)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " skipped" not in ran.stdout, ran.stdout
