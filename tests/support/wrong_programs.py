"""The programs of which `check` must name a bug: files, and right programs in which some code was replaced."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parents[1] / "conformance"
FILES = {path.stem: path.read_text("utf-8") for path in sorted((HERE / "wrong").glob("*.py"))}


def replaced(code: str, replacements: Iterable[tuple[str, str]]) -> str:
    for old, new in replacements:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def _broken() -> dict[str, str]:
    """Return the programs that are made from right ones by the replacements in their `BUGS`."""
    texts = [path.read_text("utf-8").partition("\nBUGS = ") for path in sorted((HERE / "right").glob("*.py"))]
    named = [(code, *bug) for code, _, bugs in texts if bugs for bug in ast.literal_eval(bugs).items()]
    assert len({name for _, name, _ in named} | FILES.keys()) == len(named) + len(FILES)
    return {name: replaced(code, replacements) for code, name, replacements in named}


PROGRAMS = FILES | _broken()
"""The code of each program by its name."""


def written(code: str, folder: Path) -> Path:
    path = folder / "program.py"
    path.write_text(code, "utf-8")
    return path
