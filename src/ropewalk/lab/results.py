"""The numbers of a study as reports ask for them: by task, model, method, measure and length, over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """One number on several seeds, in the order of the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def half_range(self) -> float:
        """Half the distance between the smallest and the largest; 0 for one seed."""
        return (max(self.values) - min(self.values)) / 2


class Results:
    """Rows of one task.

    Args:
        about: what `report.described` says of the task.
        rows: as `Part.run` returns them, of any task.
    """

    def __init__(self, about: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self.about = about
        self.lengths: list[int] = about["lengths"]
        self._rows = {(row["model"], row["method"], row["seed"]): row for row in rows if row["task"] == about["name"]}
        self.models = list(dict.fromkeys(model for model, _, _ in self._rows))
        self.seeds = sorted({seed for _, _, seed in self._rows})

    def methods(self, model: str) -> list[str]:
        """Measured on every seed, in the order in which they ran."""
        found = dict.fromkeys(method for kind, method, _ in self._rows if kind == model)
        return [one for one in found if all((model, one, seed) in self._rows for seed in self.seeds)]

    def values(self, model: str, method: str, measure: str) -> list[Spread]:
        """In the order of the lengths."""
        by_seed = [self._rows[model, method, seed][measure] for seed in self.seeds]
        return [Spread(values) for values in zip(*by_seed, strict=True)]

    def by_position(self, model: str, method: str) -> list[Spread]:
        """Loss by position at the longest length, in nats."""
        seeds = (self._rows[model, method, seed]["by_position"][-1] for seed in self.seeds)
        return [Spread(values) for values in zip(*seeds, strict=True)]

    def value(self, model: str, method: str, measure: str, times: float) -> Spread:
        """At so many times the trained length.

        Raises:
            KeyError: that length, method or measure was not measured.
        """
        place = self.place(times)
        if method not in self.methods(model):
            raise KeyError(method)
        return self.values(model, method, measure)[place]

    def place(self, times: float) -> int:
        """Which of the lengths is so many times the trained one.

        Raises:
            KeyError: none is.
        """
        wanted = times * self.about["trained"]
        if wanted not in self.about["tokens"]:
            raise KeyError(times)
        return int(self.about["tokens"].index(wanted))
