"""Run a table of hundreds of rows as one test that lists every failing row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def each(rows: Iterable[tuple[str, Any]], check: Callable[[Any], None]) -> None:
    """Run `check` on every row. Fail with the names of all failing rows and the first lines of their errors."""
    failures, count = [], 0
    for name, row in rows:
        count += 1
        try:
            check(row)
        except Exception as e:  # continue, to report every failing row
            failures.append(f"{name}: {type(e).__name__}: {e!s:.400}")
    assert count, "no rows"
    assert not failures, f"{len(failures)} of {count} failed\n" + "\n".join(failures)
