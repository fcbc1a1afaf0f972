"""Report the findings of a study in words: test claims of the literature on the numbers of every seed.

A claim that holds only on some seeds depends on chance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ZERO_SHOT, TUNED = "trained", "tuned"

_Cell = tuple[str, str, str, float]
"""Model, method, measure, and length as a multiple of the trained length."""


class Results:
    """The rows of one task. Each look-up returns the values of all seeds, in the order of the seeds.

    Args:
        about: the description of the task by `report.describe_task`.
        rows: rows from `Part.run`. Rows of other tasks are ignored.
    """

    def __init__(self, about: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self.about = about
        self._rows = {(row["model"], row["method"], row["seed"]): row for row in rows if row["task"] == about["name"]}
        self.models = list(dict.fromkeys(model for model, _, _ in self._rows))
        self.seeds = sorted({seed for _, _, seed in self._rows})

    def methods(self, model: str) -> list[str]:
        """Return the methods of a model that were measured on every seed, in the order in which they ran."""
        methods = dict.fromkeys(method for kind, method, _ in self._rows if kind == model)
        return [method for method in methods if all((model, method, seed) in self._rows for seed in self.seeds)]

    def values(self, model: str, method: str, measure: str) -> list[tuple[float, ...]]:
        """Return the values of a measure, in the order of the lengths."""
        return list(zip(*(self._rows[model, method, seed][measure] for seed in self.seeds), strict=True))

    def value(self, model: str, method: str, measure: str, times: float) -> tuple[float, ...]:
        """Return the value of a measure at a multiple of the trained length.

        Raises:
            KeyError: that length, method or measure was not measured.
        """
        tokens: list[int] = self.about["tokens"]
        if method not in self.methods(model) or times * self.about["trained"] not in tokens:
            raise KeyError(method, times)
        return self.values(model, method, measure)[tokens.index(int(times * self.about["trained"]))]


@dataclass(frozen=True)
class Claim:
    """A statement about some cells of the result table, which is tested for each seed.

    Attributes:
        says: the statement. {steps} in it is replaced by the number of steps of a fine-tune.
        cells: the cells that the statement is about, all of one measure.
        holds: a function that gets the numbers in these cells for one seed, and returns whether the statement is true.
    """

    says: str
    cells: tuple[_Cell, ...]
    holds: Callable[[Sequence[float]], bool]


def _cells(model: str, methods: str, measure: str, *times: float) -> tuple[_Cell, ...]:
    """Return the cells of methods, separated by commas, at multiples of the trained length."""
    return tuple((model, method, measure, t) for method in methods.split(", ") for t in times)


_COPY = (
    Claim(
        "Without scaling, copying is nearly perfect at the trained length (accuracy of at least 0.9), but accuracy "
        "falls below 0.5 at twice that length",
        _cells(ZERO_SHOT, "none", "accuracy", 1, 2),
        lambda v: v[0] >= 0.9 and v[1] < 0.5,
    ),
    *(
        Claim(
            f"At the trained length, a fixed {method} factor more than doubles the loss, but a dynamic {method} factor "
            "does not increase it",
            _cells(ZERO_SHOT, f"none, {method}, {method} dynamic", "loss", 1),
            lambda v: v[1] > 2 * v[0] and v[2] <= v[0],
        )
        for method in ("PI", "YaRN")
    ),
    *(
        Claim(
            f"{{steps}} steps of fine-tuning with {method} at 4 times the trained length give an accuracy of at least "
            "0.9 there",
            _cells(TUNED, method, "accuracy", 4),
            lambda v: v[0] >= 0.9,
        )
        for method in ("PI", "YaRN")
    ),
    *(
        Claim(
            f"After fine-tuning at 4 times the trained length, accuracy there is lower {how} than with PI and with "
            "YaRN",
            _cells(TUNED, f"{method}, PI, YaRN", "accuracy", 4),
            lambda v: v[0] < min(v[1:]),
        )
        for method, how in (("none", "without scaling"), ("NTK", "with NTK"))
    ),
    Claim(
        "No model that was fine-tuned at 4 times the trained length reaches an accuracy of 0.5 at 8 times that length",
        _cells(TUNED, "none, PI, NTK, YaRN, larger base", "accuracy", 8),
        lambda v: max(v) < 0.5,
    ),
    Claim(
        "YaRN's attention factor helps at 2 and 4 times the trained length: accuracy is higher with YaRN than with by "
        "parts, which is YaRN without this factor",
        (*_cells(ZERO_SHOT, "YaRN, by parts", "accuracy", 2), *_cells(ZERO_SHOT, "YaRN, by parts", "accuracy", 4)),
        lambda v: v[0] > v[1] and v[2] > v[3],
    ),
    Claim(
        "At twice the trained length, accuracy is higher with dynamic PI than with dynamic NTK",
        _cells(ZERO_SHOT, "PI dynamic, NTK dynamic", "accuracy", 2),
        lambda v: v[0] > v[1],
    ),
)

_TRIAL = "none, PI, NTK, by parts, YaRN, PI dynamic, NTK dynamic"
"""The methods that YaRN dynamic was compared with when it was found to be the best."""

_TEXT = (
    Claim(
        "Without scaling, perplexity explodes beyond the trained length: at twice that length, the perplexity of the "
        "last bytes is more than twice as high",
        _cells(ZERO_SHOT, "none", "last", 1, 2),
        lambda v: v[1] > 2 * v[0],
    ),
    Claim(
        "PI without fine-tuning is bad at every length: from half to 4 times the trained length, its perplexity is at "
        "least 1.5 times the perplexity without scaling at the trained length",
        (*_cells(ZERO_SHOT, "none", "perplexity", 1), *_cells(ZERO_SHOT, "PI", "perplexity", 0.5, 1, 2, 4)),
        lambda v: min(v[1:]) >= 1.5 * v[0],
    ),
    Claim(
        "NTK with factor 4 works at twice the trained length and fails at 4 times: compared with no scaling at the "
        "trained length, its perplexity of the last bytes is at most 1.25 times as high in the first case, and more "
        "than 1.5 times as high in the second",
        (*_cells(ZERO_SHOT, "none", "last", 1), *_cells(ZERO_SHOT, "NTK", "last", 2, 4)),
        lambda v: v[1] <= 1.25 * v[0] and v[2] > 1.5 * v[0],
    ),
    *(
        Claim(
            f"At the trained length, a fixed {method} factor increases the perplexity by more than 5 %, but a dynamic "
            f"{method} factor does not increase it",
            _cells(ZERO_SHOT, f"none, {method}, {method} dynamic", "perplexity", 1),
            lambda v: v[1] > 1.05 * v[0] and v[2] <= v[0],
        )
        for method in ("PI", "YaRN")
    ),
    Claim(
        "YaRN's attention factor helps at 4 times the trained length: perplexity is lower with YaRN than with by "
        "parts, which is YaRN without this factor",
        _cells(ZERO_SHOT, "YaRN, by parts", "perplexity", 4),
        lambda v: v[0] < v[1],
    ),
    *(
        Claim(
            f"Without fine-tuning, at {times} times the trained length, the perplexity of YaRN dynamic is the lowest "
            f"of {among}, or within 1 % of it",
            _cells(ZERO_SHOT, f"YaRN dynamic, {others}", "perplexity", times),
            lambda v: v[0] <= 1.01 * min(v[1:]),
        )
        for among, others in (
            ("all methods", f"{_TRIAL}, Llama 3, Self-Extend"),
            ("all methods except Llama 3 and Self-Extend", _TRIAL),
        )
        for times in (2, 4, 8)
    ),
    Claim(
        "At twice the trained length, perplexity is lower with dynamic NTK than with dynamic PI",
        _cells(ZERO_SHOT, "NTK dynamic, PI dynamic", "perplexity", 2),
        lambda v: v[0] < v[1],
    ),
    *(
        Claim(
            f"After fine-tuning at 4 times the trained length, perplexity there is lower {how}",
            _cells(TUNED, methods, "perplexity", 4),
            lambda v: v[0] < v[1],
        )
        for methods, how in (
            ("YaRN, NTK", "with YaRN than with NTK"),
            ("NTK, none", "with NTK than without scaling"),
            ("none, PI", "without scaling than with PI"),
        )
    ),
    Claim(
        "Of the fine-tuned models, only the one with the larger base still works at 8 times the trained length: "
        "only its perplexity of the last bytes is at most 1.2 times as high as at 4 times the trained length",
        _cells(TUNED, "larger base, none, PI, NTK, YaRN", "last", 4, 8),
        lambda v: v[1] <= 1.2 * v[0] and all(v[i + 1] > 1.2 * v[i] for i in range(2, len(v), 2)),
    ),
)

CLAIMS = {"copy": _COPY, "text": _TEXT}

_NAMES = {"accuracy": "Accuracy", "loss": "Loss", "perplexity": "Perplexity", "last": "Perplexity of the last bytes"}
"""Measures → their names in sentences."""


def paragraphs(results: Results) -> list[str]:
    """Write a paragraph for the claims that are true on every seed, on no seed, and on some seeds only."""
    told: dict[str, list[str]] = {"True on every seed:": [], "True on no seed:": [], "True on some seeds only:": []}
    every, none, some = told.values()
    for claim in CLAIMS[results.about["name"]]:
        with contextlib.suppress(KeyError):  # a study of fewer methods or lengths cannot test every claim
            held = [claim.holds(v) for v in zip(*(results.value(*cell) for cell in claim.cells), strict=True)]
            (every if all(held) else some if any(held) else none).append(_sentence(claim, held, results))
    return ["\n- ".join([verdict, *sentences]) for verdict, sentences in told.items() if sentences]


def _sentence(claim: Claim, held: Sequence[bool], results: Results) -> str:
    says = claim.says.format(steps=results.about["tune_steps"])
    some = f" (on {sum(held)} of {len(held)} seeds)" if 0 < sum(held) < len(held) else ""
    (measure,) = {measure for _, _, measure, _ in claim.cells}
    shown = "; ".join(_number(cell, results) for cell in claim.cells)
    return f"{says}{some}. {_NAMES[measure]}: {shown}."


def _number(cell: _Cell, results: Results) -> str:
    _, method, measure, times = cell
    values = results.value(*cell)
    return f"{method} at {times:g}x: {', '.join(f'{v:.{decimals(v, measure)}f}' for v in values)}"


def decimals(value: float, measure: str) -> int:
    """Return how many decimals to show: two for accuracies, otherwise up to four, for three significant digits."""
    if measure == "accuracy" or value == 0:
        return 2
    return min(4, max(0, 2 - math.floor(math.log10(abs(value)))))
