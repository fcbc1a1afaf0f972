"""A table of hundreds of rows is one test, which lists every row that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def each(rows: Iterable[tuple[str, Any]], check: Callable[[Any], None]) -> None:
    """Run `check` on every row, and fail with the names and the first lines of all that failed."""
    failures, count = [], 0
    for name, row in rows:
        count += 1
        try:
            check(row)
        except Exception as e:  # whatever is wrong with one row, the others are still worth knowing
            failures.append(f"{name}: {type(e).__name__}: {e!s:.400}")
    assert count, "no rows"
    assert not failures, f"{len(failures)} of {count} failed\n" + "\n".join(failures)
