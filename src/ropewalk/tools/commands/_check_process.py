"""Run the check of `ropewalk check` in a process of its own: `python -m ropewalk.tools.commands._check_process FOLDER`.

FOLDER has the arguments in asked.json. The report is written to report.json there, since stdout is the target's.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ropewalk import RopeError, _checks, conformance


def main(folder: Path) -> None:
    """Check the target, and write the report, or the error."""
    asked = json.loads((folder / "asked.json").read_text())
    _checks.OPTIONS.set(asked["options"])
    _limit(asked["seconds"])
    printed = _Limited(sys.stderr, 100_000)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        printed.write(f"{conformance.says_what_runs(asked['target'])}\n")
        try:
            report = conformance.check(asked["target"], **asked["arguments"])
            answer: dict[str, Any] = {"facts": report.to_dict(), "text": str(report)}
        except (RopeError, OSError, KeyboardInterrupt) as e:
            answer = {"error": str(e) or "check was interrupted."}
    (folder / "part").write_text(json.dumps(answer))
    (folder / "part").rename(folder / "report.json")


def _limit(seconds: float) -> None:
    """Let the system end this process after some more CPU time, which not every system can."""
    with contextlib.suppress(ImportError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


class _Limited(io.TextIOBase):
    """Writes text to a stream up to a limit, and drops the rest."""

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream, self.left = stream, limit

    def write(self, text: str) -> int:
        """Write the part of the text that is within the limit."""
        if self.left > 0:
            self.stream.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self.stream.write("\nThe rest of what TARGET prints is not shown.\n")
        return len(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
