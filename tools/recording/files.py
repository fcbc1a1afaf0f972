"""Compare the rows of a golden file with rows recorded again, say what changed, and write them."""

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
    """The name of a row in the report. Its first word, or all of it, asks for the row."""
    record: Callable[..., dict[str, Any]]
    """The row again, of a row; `KeyError` where the installed packages do not have the model."""
    package: str = "transformers"
    rows: str = "rows"
    """Where the rows stand in a file."""
    written: bool = True
    """Whether what was recorded may take the place of a row."""
    source: bool = False
    """Whether `record` takes a clone of a repository as `source`."""
    new: Callable[[list[str], int], dict[str, str]] | None = None
    """What the installed packages have and the file has not, among these names, with seconds for each."""

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Every row as committed."""
        if path.is_dir():
            return [load(file) for file in sorted(path.glob("*.json"))]
        return load(path)[self.rows]  # type: ignore[no-any-return]

    @property
    def peer(self) -> dict[str, str]:
        """What a file says of a new recording; a commit stays."""
        return {} if self.source else {"version": version(self.package)}

    def asks(self, names: list[str], row: dict[str, Any]) -> bool:
        key = self.key(row)
        return not names or key in names or key.split()[0] in names


@dataclass
class Outcome:
    """What a recording found, by the key of the row."""

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
        """The report: what changed first."""
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
    """The version of a package, or that it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def quiet() -> None:
    """No network, and no remarks of transformers on class defaults that fit badly."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def seconds(limit: int, refusal: type[Exception]) -> Iterator[None]:
    """Raise `refusal` in a body that takes longer than `limit` seconds, where the system has alarms."""

    def stop(*_: Any) -> None:
        raise refusal(f"it took longer than {limit} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit, 2)  # again for each class that is tried after the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """Every place where two rows differ, as `layers.0.inv_freq[3]: 0.5 is now 0.25`; numbers bit for bit."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in {**old, **new}
            for line in differences(old.get(name, "nothing"), new.get(name, "nothing"), f"{at}.{name}".strip("."))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i, pair in enumerate(zip(old, new, strict=True)) for line in differences(*pair, f"{at}[{i}]")]
    if old == new and isinstance(old, bool) == isinstance(new, bool) and str(old).lstrip()[:1] == str(new).lstrip()[:1]:
        return []  # the first character tells 0.0 from -0.0
    return [f"{at}: {str(old)[:60]} is now {str(new)[:60]}"]


def compare(
    rows: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], str],
    record: Callable[[dict[str, Any]], dict[str, Any]],
    refusal: type[Exception],
) -> Outcome:
    """Record every row again.

    Args:
        rows: as committed.
        key: the name of a row in the report.
        record: the row again; `KeyError` where the installed packages do not have the model.
        refusal: what `record` raises where a row cannot be recorded. The committed row is kept.
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
            outcome.rows.append(row)  # the committed order of keys
    return outcome


def write(path: Path, golden: Golden, outcome: Outcome) -> None:
    """Write the rows of an outcome in the place of those with their key; rows that were not asked for stay."""
    asked = {*outcome.same, *outcome.moved, *outcome.kept, *outcome.gone}
    again = iter(outcome.rows)
    rows = []
    for row in golden.read(path):
        if golden.key(row) not in asked:
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
