"""Look up the numbers of a study by task, model, method, measure and length. Each look-up returns all seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The values of one number on all seeds, in the order of the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def half_range(self) -> float:
        """Half the difference between the largest and the smallest value. It is 0 for one seed."""
        return (max(self.values) - min(self.values)) / 2


class Results:
    """The rows of one task.

    Args:
        about: the description of the task by `report.describe_task`.
        rows: rows from `Part.run`. Rows of other tasks are ignored.
    """

    def __init__(self, about: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self.about = about
        self.lengths: list[int] = about["lengths"]
        self._rows = {(row["model"], row["method"], row["seed"]): row for row in rows if row["task"] == about["name"]}
        self.models = list(dict.fromkeys(model for model, _, _ in self._rows))
        self.seeds = sorted({seed for _, _, seed in self._rows})

    def methods(self, model: str) -> list[str]:
        """Return the methods of a model that were measured on every seed, in the order in which they ran."""
        methods = dict.fromkeys(method for kind, method, _ in self._rows if kind == model)
        return [method for method in methods if all((model, method, seed) in self._rows for seed in self.seeds)]

    def values(self, model: str, method: str, measure: str) -> list[Spread]:
        """Return the values of a measure, in the order of the lengths."""
        by_seed = [self._rows[model, method, seed][measure] for seed in self.seeds]
        return [Spread(values) for values in zip(*by_seed, strict=True)]

    def loss_by_position(self, model: str, method: str) -> list[Spread]:
        """Return the loss by position at the longest length, in nats."""
        seeds = (self._rows[model, method, seed]["by_position"][-1] for seed in self.seeds)
        return [Spread(values) for values in zip(*seeds, strict=True)]

    def value(self, model: str, method: str, measure: str, times: float) -> Spread:
        """Return the value of a measure at a multiple of the trained length.

        Raises:
            KeyError: that length, method or measure was not measured.
        """
        place = self.length_index(times)
        if method not in self.methods(model):
            raise KeyError(method)
        return self.values(model, method, measure)[place]

    def length_index(self, times: float) -> int:
        """Return the index of the length that is this multiple of the trained length.

        Raises:
            KeyError: there is no such length.
        """
        tokens = times * self.about["trained"]
        if tokens not in self.about["tokens"]:
            raise KeyError(times)
        return int(self.about["tokens"].index(tokens))
