"""Compare the rows of a golden file with newly recorded rows, report what changed, and write them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden"


@dataclass(frozen=True)
class Golden:
    """A golden file, or a folder of files with one row each, and how its rows are recorded."""

    path: str
    key: Callable[[dict[str, Any]], str]
    """Returns the name of a row for the report. The user selects a row by this name, or by its first word."""
    record: Callable[..., dict[str, Any]]
    """Records a committed row again. Raises KeyError if the installed packages do not have the model."""
    package: str = "transformers"
    rows: str = "rows"
    """The key of the list of rows in a file."""
    replaceable: bool = True
    """Whether a recorded row may replace the committed one."""
    source: bool = False
    """Whether `record` is also passed a clone of a repository."""
    new: Callable[[list[str], int], dict[str, str]] | None = None
    """Returns name → description of models that the installed packages have and the file lacks.

    It is passed the names to look for (empty for all) and the time limit of each in seconds.
    """

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Read all committed rows."""
        if path.is_dir():
            return [load(file) for file in sorted(path.glob("*.json"))]
        return load(path)[self.rows]  # type: ignore[no-any-return]

    @property
    def peer(self) -> dict[str, str]:
        """The entries of a file's `peer` that a new recording changes: the version of a package, but no commit."""
        return {} if self.source else {"version": version(self.package)}

    def selects(self, names: list[str], row: dict[str, Any]) -> bool:
        """Return whether the names select this row. No names select every row."""
        key = self.key(row)
        return not names or key in names or key.split()[0] in names


@dataclass
class Outcome:
    """The result of a comparison. All dictionaries map the key of a row to a description.

    Args:
        same: the keys of unchanged rows.
        moved: rows with other numbers.
        kept: rows that could not be recorded, with the reason.
        gone: rows that the installed packages do not have.
        new: models that the file lacks.
        rows: the rows to write.
    """

    same: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return bool(self.moved or self.gone or self.new)

    def lines(self, golden: Golden) -> list[str]:
        """Return the lines of the report. What changed comes first."""
        words = {
            "new": "new model type",
            "moved": "moved",
            "gone": "gone",
            "kept": "kept as committed, not recorded",
        }
        lines = [
            f"{word}: {name}: {what}" for kind, word in words.items() for name, what in getattr(self, kind).items()
        ]
        counts = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in ("same", "moved", "gone", "kept", "new"))
        return [*lines, f"{golden.path}, {golden.package} {installed(golden.package)}: {counts}"]


def installed(package: str) -> str:
    """Return the version of a package, or "(not installed)"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def quiet() -> None:
    """Disable the network, warnings, and transformers' messages about unusual class defaults."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def seconds(limit: int, refusal: type[Exception]) -> Iterator[None]:
    """Raise `refusal` in the body if it takes longer than `limit` seconds. Without SIGALRM there is no limit."""

    def stop(*_: Any) -> None:
        raise refusal(f"it took longer than {limit} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit, 2)  # the body may catch it and try another class, so raise again
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """List where two rows differ, such as `layers.0.inv_freq[3]: 0.5 is now 0.25`. Numbers are compared bit for bit."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in {**old, **new}
            for line in differences(old.get(name, "nothing"), new.get(name, "nothing"), f"{at}.{name}".strip("."))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i, pair in enumerate(zip(old, new, strict=True)) for line in differences(*pair, f"{at}[{i}]")]
    if old == new and isinstance(old, bool) == isinstance(new, bool) and str(old).lstrip()[:1] == str(new).lstrip()[:1]:
        return []  # the first characters of 0.0 and -0.0 differ
    return [f"{at}: {str(old)[:60]} is now {str(new)[:60]}"]


def compare(
    rows: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], str],
    record: Callable[[dict[str, Any]], dict[str, Any]],
    refusal: type[Exception],
) -> Outcome:
    """Record every row again, and compare it with the committed one.

    Args:
        rows: the committed rows.
        key: returns the name of a row.
        record: records a row again. It raises KeyError if the installed packages do not have the model.
        refusal: the exception that `record` raises if a row cannot be recorded. The committed row is then kept.
    """
    outcome = Outcome()
    for row in rows:
        name = key(row)
        try:
            again = record(row)
        except refusal as error:
            outcome.kept[name] = str(error)
            outcome.rows.append(row)
            continue
        except KeyError:
            outcome.gone[name] = "the installed packages do not have it"
            continue
        if found := differences(row, again):
            more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
            outcome.moved[name] = "; ".join(found[:3]) + more
            outcome.rows.append(again)
        else:
            outcome.same.append(name)
            outcome.rows.append(row)  # not `again`, to keep the order of the keys
    return outcome


def write(path: Path, golden: Golden, outcome: Outcome) -> None:
    """Replace the rows that an outcome is about. Rows that were not selected stay."""
    selected = {*outcome.same, *outcome.moved, *outcome.kept, *outcome.gone}
    again = iter(outcome.rows)
    rows = []
    for row in golden.read(path):
        if golden.key(row) not in selected:
            rows.append(row)
        elif golden.key(row) not in outcome.gone:
            rows.append(next(again))
    if path.is_dir():
        for row in rows:
            dump(path / f"{golden.key(row)}.json", {**row, "peer": {**row["peer"], **golden.peer}})
        return
    committed = load(path)
    dump(path, {**committed, "peer": {**committed["peer"], **golden.peer}, golden.rows: rows})


def dump(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, separators=(",", ":")) + "\n")
