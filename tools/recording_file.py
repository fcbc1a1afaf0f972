"""Compare the rows of a golden file with rows recorded again, say what changed, and write them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"


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

    def lines(self) -> list[str]:
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
        return [*lines, f"transformers {version('transformers')}: {counts}"]


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
    if old == new and isinstance(old, bool) == isinstance(new, bool):
        return []
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


def write(path: Path, committed: dict[str, Any], outcome: Outcome, key: Callable[[dict[str, Any]], str]) -> None:
    """Write the rows of an outcome in the place of those with their key; rows that were not asked for stay."""
    asked = {*outcome.same, *outcome.moved, *outcome.kept, *outcome.gone}
    again = iter(outcome.rows)
    rows = []
    for row in committed["rows"]:
        if key(row) not in asked:
            rows.append(row)
        elif key(row) not in outcome.gone:
            rows.append(next(again))
    rows += again
    peer = {**committed["peer"], "version": version("transformers")}
    path.write_text(json.dumps({**committed, "peer": peer, "rows": rows}, separators=(",", ":")) + "\n")
