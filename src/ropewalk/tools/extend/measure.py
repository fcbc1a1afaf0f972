"""Measure how far a model copies, and which method and factor let it copy farther. The model is the user's own."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk._checks import error
from ropewalk.tools.extend.filled import filled
from ropewalk.tools.extend.measured import Measured
from ropewalk.tools.extend.subject import PASSAGE, WHO, Subject

SHARE = 0.9
"""The share of its usual copy that a model must keep, to reach a distance."""
SEEDS = (0, 1, 2)

_TWENTIETHS = (*range(2, 10, 2), *range(10, 25))  # of the stated length, at which it copies without scaling
_MARGINS = (1.0, 1.5, 2.0)  # of target / reach
_SHORT = 512  # tokens of a short text
_KNOWS = 0.2  # a model that copies less than this at every distance cannot be judged


def measure(
    model_source: str | Path,
    target: int,
    *,
    text: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    keep: Path | None = None,
    progress: bool = True,
) -> Measured:
    """Measure the reach of a model without scaling, and the methods and factors that could reach a target.

    Args:
        model_source, text, dtype, device: as for `Subject`. With a text, the whole target is read too.
        target: the length to reach, in tokens.
        keep: a JSON file for the results, from which another call continues; None for none.
        progress: whether to show a bar with the estimated time, on the standard error output.

    Raises:
        RopeError: as for `Subject`; the text is shorter than the target; or the file cannot be written, or belongs to
            another measurement.
    """
    target = _checks.length(WHO, "to", target, at_least=4 * PASSAGE)
    subject = Subject(model_source, text=text, dtype=dtype, device=device)
    if text is not None and len(subject.tokens) < target:
        got = f"{len(subject.tokens):,} tokens for {target:,}"
        raise error(WHO, "the text must be as long as the target", got, "Pass a longer text, or none.")
    about = {"model": str(model_source), "text": subject.digest, "dtype": dtype, "stated_length": subject.stated}
    steps = Steps(keep, about, progress)
    facts = {**about, "text": None if text is None else str(text), "device": device, "target": target}
    found = find(subject, target, steps)
    if text is not None and found["method"] is not None:
        found["filled"] = filled(subject, target, steps, found["method"], found["factor"])
    steps.close()
    return Measured({**facts, "seconds": round(steps.seconds), **found})


def find(subject: Any, target: int, steps: Steps) -> dict[str, Any]:
    """Return the reach, the table of methods and factors, and the choice, from what a `Subject` measures."""
    rows = 3 * len(_MARGINS) * len(subject.methods)  # the target, half of it, and a short text
    steps.expect(len(SEEDS) * (2 + len(_TWENTIETHS) + rows))

    def copies(distance: int, *how: Any, **options: Any) -> list[list[float]]:
        return [steps.do(subject.copy, distance, seed, *how, **options) for seed in SEEDS]

    guessed = statistics.mean(real for _, real in copies(max(2 * PASSAGE, subject.stated // 10), seen=False))

    def share(rows: Sequence[Sequence[float]]) -> float:
        """Return the share of tokens that were copied: of the real ones, beyond those that the model guesses."""
        return statistics.mean((random + max(0.0, real - guessed) / (1 - guessed)) / 2 for random, real in rows)

    distances = sorted({max(PASSAGE, subject.stated * part // 20) for part in _TWENTIETHS})
    unscaled = {distance: copies(distance) for distance in distances}
    curve = {distance: share(rows) for distance, rows in unscaled.items()}
    reach, usual = reach_of(curve)
    found: dict[str, Any] = {
        "guessed": guessed,
        "unscaled": [{"distance": d, "copied": copied, "seeds": unscaled[d]} for d, copied in curve.items()],
        "reach": reach,
        "usual": usual,
        "bar": SHARE * usual,
        "rows": [],
        "method": None,
        "factor": None,
    }
    if not reach:
        return found
    if target <= reach:
        return {**found, "method": "none", "factor": 1.0}
    shorts = [steps.do(subject.loss, _SHORT, seed) for seed in SEEDS]
    for method in subject.methods:
        for factor in factors_of(target, reach, subject.stated, subject.factor):
            far, half = (copies(distance, method, factor) for distance in (target - PASSAGE, (target - PASSAGE) // 2))
            paid = [steps.do(subject.loss, _SHORT, seed, method, factor) for seed in SEEDS]
            found["rows"].append(
                {
                    "method": method,
                    "factor": factor,
                    "at_target": share(far),
                    "at_half": share(half),
                    "lowest": min(share([row]) for row in far),
                    "short": statistics.mean(b - a for a, b in zip(shorts, paid, strict=True)),
                    "seeds": {"at_target": far, "at_half": half, "short": paid},
                }
            )
    if (best := best_of(found["rows"], found["bar"])) is not None:
        found |= {"method": best["method"], "factor": best["factor"]}
    return found


def reach_of(curve: Mapping[int, float]) -> tuple[int, float]:
    """Return the reach of a model, and its usual copy.

    The reach is the last distance at which the model copies `SHARE` of what it usually does up to there, which is the
    median. So a dip at shorter distances does not end it, and a slow slope does not either; a cliff does. A copy of
    less than half of the best does not count.

    Args:
        curve: the copied share of each distance without scaling.

    Returns:
        A distance in tokens and a share; (0, the best share) if the model does not copy.
    """
    best, found = max(curve.values()), (0, max(curve.values()))
    seen: list[float] = []
    for distance, copied in sorted(curve.items()):
        seen.append(copied)
        usual = statistics.median(seen)
        if copied >= SHARE * usual and copied >= best / 2 and best >= _KNOWS:
            found = distance, usual
    return found


def factors_of(target: int, reach: int, stated: int, now: float) -> list[float]:
    """Return the factors to try, on top of the config's own: 1, 1.5 and 2 times what stretches the reach, rounded up.

    None is less than target / stated length, which engines require.
    """
    stretch, least = (target - PASSAGE) / reach, math.ceil(target / stated)
    return list(dict.fromkeys(now * max(least, math.ceil(margin * stretch)) for margin in _MARGINS))


def best_of(rows: Iterable[Mapping[str, Any]], bar: float) -> Mapping[str, Any] | None:
    """Return the row of the smallest factor with which a method reaches; of several, that with the least loss."""
    reaching = [row for row in rows if row["at_target"] >= bar]
    return min(reaching, key=lambda row: (row["factor"], row["short"]), default=None)


class Steps:
    """Runs the steps of a measurement, and keeps the result of each in a file, from which another call continues."""

    def __init__(self, path: Path | None, about: Mapping[str, Any], progress: bool) -> None:
        self.seconds, self._path, self._bar, self._progress = 0.0, path, None, progress
        self._kept: dict[str, Any] = {"about": dict(about), "steps": {}, "seconds": 0.0}
        if path is not None and path.exists():
            self._load(path)
        self._save()

    def _load(self, path: Path) -> None:
        try:
            kept = json.loads(path.read_text())
            about, self.seconds = kept["about"], kept["seconds"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            fix = "Pass another file, which is then written."
            raise _checks.error_from(f"{WHO}: {path} does not hold kept results", e, fix) from e
        if about != self._kept["about"]:
            differs = [key for key in about if about[key] != self._kept["about"].get(key)]
            must = f"the results in {path} must be of this measurement"
            raise error(WHO, must, f"other values of {', '.join(differs)}", "Pass another file.")
        self._kept = kept

    def expect(self, count: int) -> None:
        """Say how many steps there will be, at most."""
        if self._progress:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=count, desc="measuring", unit="step", smoothing=0.1)

    def do(self, function: Callable[..., Any], *how: Any, **options: Any) -> Any:
        """Return the result of a function, which is a JSON value, from the file if it is there."""
        name = " ".join([function.__name__, *map(str, how), *(f"{key}={value}" for key, value in options.items())])
        steps = self._kept["steps"]
        if name not in steps:
            start = time.monotonic()
            steps[name] = function(*how, **options)
            self.seconds += time.monotonic() - start
            self._kept["seconds"] = self.seconds
            self._save()
        if self._bar is not None:
            self._bar.update()
        return steps[name]

    def _save(self) -> None:
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps(self._kept))
            new.replace(self._path)
        except OSError as e:
            raise error(WHO, "keep must be writable", f"{self._path} ({e.strerror})", "Pass another path.") from e

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
