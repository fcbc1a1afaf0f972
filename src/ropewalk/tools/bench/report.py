"""Print the results of the benchmarks, and write them as JSON."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ropewalk._checks import error, shown
from ropewalk.tools.bench import machine
from ropewalk.tools.bench.case import HEAD_DIM, KV_HEADS, Q_HEADS, Case
from ropewalk.tools.bench.contenders import FLOOR, Contender
from ropewalk.tools.bench.memory import DESCRIBED

Say = Callable[[str], None]
HEADS = f"{Q_HEADS} query heads, {KV_HEADS} key heads, head_dim {HEAD_DIM}"


def select_contenders(every: Sequence[Contender], only: Sequence[str], compiled: bool) -> list[Contender]:
    """Select the contenders to time. FLOOR, the plain copy to which all times are compared, is always selected.

    Args:
        every: all contenders, including FLOOR.
        only: as for `select`.
        compiled: whether to include contenders under torch.compile.

    Raises:
        RopeError: `only` selects nothing but FLOOR.
    """
    available = [contender for contender in every if compiled or not contender.compiled]
    names = [contender.name for contender in available if contender.name != FLOOR]
    what = f"a contender other than {FLOOR}, which is always measured"
    selected = {FLOOR, *select(names, only, what)}
    return [contender for contender in available if contender.name in selected]


def select(names: Sequence[str], only: Sequence[str], what: str) -> list[str]:
    """Select the names that contain one of the texts in `only`, or all names if it is empty.

    Raises:
        RopeError: `only` selects nothing. The message says that it must name `what`.
    """
    selected = [name for name in names if not only or any(part in name for part in only)]
    if not selected:
        listed = f"The contenders are {', '.join(map(repr, names))}."
        raise error("bench", f"only must name {what}", ", ".join(map(shown, only)), listed)
    return selected


class Report:
    """Collects results in `found`, prints them, and writes the JSON file at the start and after each table."""

    def __init__(self, settings: dict[str, Any], parts: dict[str, Any], say: Say, json_file: Path | None) -> None:
        """Create the report.

        Args:
            settings: the settings of the run.
            parts: further entries of `found`.
            say: called with each printed line.
            json_file: file for the results as JSON, or None.

        Raises:
            OSError: the file cannot be written.
        """
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.found: dict[str, Any] = {"date": date, **machine.describe(), "settings": settings, **parts}
        self._say, self._json_file = say, json_file
        self.write()

    def write(self) -> None:
        if self._json_file is not None:
            self._json_file.write_text(json.dumps(self.found, indent=1, allow_nan=False) + "\n")

    def introduce(self, *lines: str) -> None:
        """Print lines about the run, the processor, and a warning if the machine is busy."""
        about = self.found["machine"]
        for line in (*lines, f"{about['cpu']} ({about['make'] or 'unknown make'}), {about['cores']} cores"):
            self._say(line)
        load = self.found["machine"]["load"] or 0.0
        if load > 0.5:
            self._say(f"Warning: the machine is busy (load {load:.1f}). Compare only times within the same table.")

    def add(self, case: Case, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of one case to `found`, print them as a table, and write the JSON file."""
        self.found["rows"] += rows
        _show(case, rows, self._say)
        self.write()


def _show(case: Case, rows: Sequence[dict[str, Any]], say: Say) -> None:
    width = max(24, *(len(row["contender"]) for row in rows))
    last = "host" if any("host" in row for row in rows) else "page faults"
    memory = DESCRIBED.get(rows[0].get("memory", ""))
    say("")
    say(f"{case.title}{', ' if memory else ''}{memory or ''}: {case.bytes_moved / 1e6:,.2f} MB read and written")
    say(f"  {'':<{width}} {'median':>10}  {'10-90 % of samples':>23}  {'GB/s':>6}  {'x copy_':>7}  {last:>13}")
    for row in rows:
        say(f"  {row['contender']:<{width}} {_line(row)}")
    table, rotated = (
        next((r.get("median") for r in rows if r["contender"] == name), None)
        for name in ("ropewalk, table", "ropewalk")
    )
    if table and rotated:
        say(f"  Computing cos and sin takes {table / rotated:.2f} x the time of the rotation.")


def _line(row: dict[str, Any]) -> str:
    if row["state"] == "wrong":
        return f"wrong: error {float(row['error']):.1e}, allowed {row['allowed']:.1e}; not timed"
    if row["state"] != "timed":
        return f"{row['state']}: {row['reason']}"
    spread = f"{describe_time(row['p10'])} - {describe_time(row['p90'])}"
    speed, ratio = ("" if x is None else f"{x:.{n}f}" for x, n in ((row["gb_per_s"], 1), (row["times_copy"], 2)))
    faults = " - ".join(f"{n:,}" for n in sorted(set(row.get("faults", ()))))
    last = describe_time(row["host"]) if "host" in row else faults
    return f"{describe_time(row['median']):>10}  {spread:>23}  {speed:>6}  {ratio:>7}  {last:>13}"


def describe_time(seconds: float) -> str:
    """Return a time in microseconds or milliseconds, as text."""
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
