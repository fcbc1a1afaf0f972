"""Read a file, or run a command, in a separate process with limits of processor time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_CODE = """
import json, resource, sys
from pathlib import Path
from click.testing import CliRunner
from ropewalk.configs import from_config
from ropewalk.tools.cli import main
from ropewalk import RopeError
arguments = json.loads(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
if Path("/proc/self/statm").exists():
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]) * 2**20,) * 2)
try:
    if isinstance(arguments, list):
        said = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    else:
        said = from_config(**arguments).explain()
except RopeError as refusal:
    said = f"refused: {refusal}"
after = resource.getrusage(resource.RUSAGE_SELF)
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([said, seconds]))
"""


def read(path: Path, *, mebibytes: int = 170, **arguments: Any) -> tuple[str, float]:
    """Return the output of from_config and explain for a file, and the processor time in seconds.

    The process measures itself, so that others on the machine change nothing. It ends after 30 seconds of processor
    time, and gets a MemoryError where it needs more memory, beside what Python and NumPy take, than `mebibytes`.
    """
    return _measured({"config": str(path), **arguments}, mebibytes)


def run(*arguments: object, mebibytes: int = 170) -> tuple[str, float]:
    """Return the output of a command of `ropewalk`, and the processor time in seconds, within the limits of `read`."""
    return _measured([str(argument) for argument in arguments], mebibytes)


def _measured(arguments: object, mebibytes: int) -> tuple[str, float]:
    command = [sys.executable, "-c", _CODE, json.dumps(arguments), str(mebibytes)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, f"rc {ran.returncode}: {ran.stderr[-500:]}"
    said, seconds = json.loads(ran.stdout)
    return said, seconds
