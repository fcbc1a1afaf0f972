"""keep_memory: new tensors without page faults, and its refusal elsewhere."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

import ropewalk
from ropewalk import RopeError

PROGRAM = """
import resource, torch, ropewalk
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(32 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.set_num_threads(1)
faults()
new = faults()
ropewalk.keep_memory()
print(new, min(faults() for _ in range(32)))  # the first ones may still grow the heap
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or sys.platform != "linux", reason="only glibc has the options")
def test_new_tensors_get_pages_that_the_process_has() -> None:
    """A tensor of 128 MiB, more than glibc keeps by itself, has at least 64 pages."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    new, kept = map(int, ran.stdout.split())
    assert new >= 64
    assert kept <= 4


@pytest.mark.parametrize(("system", "library"), [("darwin", ""), ("linux", ""), ("win32", "")])
def test_refused_elsewhere(system: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    message = f"keep_memory: the process must run on Linux with glibc, got {system} with another C library"
    with pytest.raises(RopeError, match=message):
        ropewalk.keep_memory()
