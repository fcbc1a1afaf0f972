"""Programs that tests run: CMake, compilers and their results. What is missing skips a test, or fails it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

CC, CXX = os.environ.get("CC") or "cc", os.environ.get("CXX") or "c++"


def need(program: str) -> str:
    """Return the path of a program. If it is missing, skip the test as `skip` does."""
    found = shutil.which(program.split()[0])
    return skip(f"there is no {program}") if found is None else found


def skip(reason: str) -> NoReturn:
    """Skip the test because the CPU kernels, or what builds them, are missing. With ROPEWALK_REQUIRE_KERNEL=1, fail."""
    if os.environ.get("ROPEWALK_REQUIRE_KERNEL") == "1":
        pytest.fail(f"ROPEWALK_REQUIRE_KERNEL=1, but {reason}")
    pytest.skip(reason)


def output(*command: str | Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}:\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def configure(build: Path, *options: str) -> str:
    """Let CMake generate the Ninja files of the kernels without Python. Return its output."""
    for program in (CC, CXX, "ninja"):
        need(program)
    root = Path(__file__).parents[2]
    return output(need("cmake"), "-G", "Ninja", "-S", root, "-B", build, *options)
