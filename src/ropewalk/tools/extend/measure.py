"""Measure how far a model copies, and which method and factor let it copy farther. The model is the user's own."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk import _checks
from ropewalk._checks import RopeError, error
from ropewalk.tools.extend.subject import PASSAGE, SELF_EXTEND, WHO, Subject

SHARE = 0.9
"""The share of its usual copy that a model must keep, to reach a distance."""
SEEDS = (0, 1, 2)

_TWENTIETHS = (*range(2, 10, 2), *range(10, 25))  # of the stated length, at which it copies without scaling
_MARGINS = (1.0, 1.5, 2.0)  # of target / reach
_NEAR = 4  # Self-Extend leaves a distance of reach / 4 alone
_SHORT = 512  # tokens of a short text
_KNOWS = 0.2  # a model that copies less than this at every distance cannot be judged


def measure(
    model_source: str | Path,
    target: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    keep: Path | None = None,
) -> dict[str, Any]:
    """Measure the reach of a model without scaling, and the methods and factors that could reach a target.

    A bar on the standard error output shows the time that is left.

    Args:
        model_source, dtype, device: as for `Subject`.
        target: the length to reach, in tokens.
        keep: a JSON file for the results, from which another call continues; None for none.

    Returns:
        What was found, as JSON values, for `measured_text`. "method" and "factor" are those for engines:
        "none" and 1.0 if the model reaches the target as it is, None if no method was found. "engines" maps each method
        that reaches to its factor, the best first.

    Raises:
        RopeError: as for `Subject`; or the file cannot be written, or holds something else.
    """
    target = _checks.length(WHO, "to", target, at_least=4 * PASSAGE)
    subject = Subject(model_source, dtype=dtype, device=device)
    about = f"{model_source} of {subject.stated} tokens in {dtype}, text {subject.digest}"
    tried = len(_MARGINS) * (len(subject.methods) + 1)
    steps = Steps(keep, about, len(SEEDS) * (2 + len(_TWENTIETHS) + 3 * tried))
    found = find(subject, target, steps)
    steps.bar.close()
    asked = {"model": str(model_source), "dtype": dtype, "device": device, "target": target}
    return {**asked, "stated_length": subject.stated, "layer": subject.layer, "kind": subject.kind, **found}


def find(subject: Any, target: int, steps: Steps) -> dict[str, Any]:
    """Return the reach, the table of methods and factors, and the choice, from what a `Subject` measures."""

    def copies(distance: int, *way: Any, **options: Any) -> list[list[float]]:
        return [steps.do(subject.copy, distance, seed, *way, **options) for seed in SEEDS]

    def losses(*way: Any) -> list[float]:
        return [steps.do(subject.loss, _SHORT, seed, *way) for seed in SEEDS]

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
        "engines": {},
        "self_extend": None,
    }
    if not reach:
        return found
    if target <= reach:
        return {**found, "method": "none", "factor": 1.0}
    shorts = losses()
    near = reach // _NEAR
    ways: list[tuple[Any, ...]] = [
        (method, factor)
        for method in subject.methods
        for factor in factors_of(target, reach, subject.stated, subject.factor)
    ]
    # Self-Extend is on top of the config's scheme, and leaves the nearest tokens alone.
    ways += [(SELF_EXTEND, size, near) for size in factors_of(target - near, reach - near, subject.stated - near, 1.0)]
    for way in ways:
        try:
            far, half = (copies(distance, *way) for distance in (target - PASSAGE, (target - PASSAGE) // 2))
        except RopeError as e:
            if way[0] != SELF_EXTEND:
                raise
            found["left_out"] = str(e)
            break
        paid = losses(*way)
        found["rows"].append(
            {
                **dict(zip(("method", "factor", "window"), way, strict=False)),
                "at_target": share(far),
                "at_half": share(half),
                "lowest": min(share([row]) for row in far),
                "short": statistics.mean(b - a for a, b in zip(shorts, paid, strict=True)),
                "seeds": {"at_target": far, "at_half": half, "short": paid},
            }
        )
    best = {
        method: best_of([row for row in found["rows"] if row["method"] == method], found["bar"])
        for method in (*subject.methods, SELF_EXTEND)
    }
    found["self_extend"] = best.pop(SELF_EXTEND)
    found["engines"] = {row["method"]: row["factor"] for row in sorted(filter(None, best.values()), key=_cost)}
    found["method"], found["factor"] = next(iter(found["engines"].items()), (None, None))
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
    return min(reaching, key=_cost, default=None)


def _cost(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["factor"], row["short"]


class Steps:
    """Runs the steps of a measurement, and keeps the result of each in a file, from which another call continues.

    Args:
        path: a JSON file, which may hold the results of several measurements; None for none.
        about: what decides results besides the arguments of a step, such as the model.
        count: how many steps there are, at most.
    """

    def __init__(self, path: Path | None, about: str, count: int) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._path, self._about, self._kept = path, about, {}
        if path is not None and path.exists():
            try:
                self._kept = json.loads(path.read_text())[WHO]
            except (OSError, ValueError, KeyError, TypeError) as e:
                fix = "Pass another file, which is then written."
                raise _checks.error_from(f"{WHO}: {path} does not hold kept results", e, fix) from e
        self._save()
        self.bar: Any = tqdm(total=count, desc="measuring", smoothing=0)

    def do(self, function: Callable[..., Any], *how: Any, **options: Any) -> Any:
        """Return the result of a function with these arguments, a JSON value, from the file if it is there."""
        arguments = [*map(str, how), *(f"{key}={value}" for key, value in options.items())]
        name = " ".join([f"{self._about}:", function.__name__, *arguments])
        if name in self._kept:
            self.bar.total -= 1
        else:
            self._kept[name] = function(*how, **options)
            self._save()
            self.bar.update()
        return self._kept[name]

    def _save(self) -> None:
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps({WHO: self._kept}))
            new.replace(self._path)
        except OSError as e:
            raise error(WHO, "keep must be writable", f"{self._path} ({e.strerror})", "Pass another path.") from e
