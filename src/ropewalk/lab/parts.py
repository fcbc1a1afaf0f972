"""The study cut into parts: each is one training and what is measured on it, and is kept when it is done.

A killed process loses the step it was in, or the row it was measuring.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ropewalk import Rope, _checks
from ropewalk.lab import ranks
from ropewalk.lab.files import writing
from ropewalk.lab.measure import Plan
from ropewalk.lab.methods import METHODS, TUNES, Method
from ropewalk.lab.model import LanguageModel, Size
from ropewalk.lab.progress import Progress
from ropewalk.lab.tasks import Task
from ropewalk.lab.train import Recipe, train

BASELINES = {
    "learned": "a learned vector for each absolute position; beyond the trained ones they are as they began",
    "sinusoidal": "the sines and cosines of the first Transformer, added to the embeddings",
    "no positions": "nothing but the causal mask",
}
"""Trainings of their own: name → what tells the model where a token is, instead of rotation."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One training of one task with one seed.

    Args:
        model: "trained" with rotation; "tuned": a fine-tune of that; or a key of BASELINES.
        method: what a fine-tune trains with; None elsewhere.
    """

    task: Task
    seed: int
    model: str
    method: Method | None = None

    @property
    def name(self) -> str:
        """Also the name of its files."""
        words = [self.task.name, str(self.seed), self.model, *([self.method.name] if self.method else [])]
        return "-".join(words).replace(" ", "-")

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
        return self.task.tune_recipe if self.method else self.task.recipe

    @property
    def longest(self) -> int:
        """The longest sequence that it trains on, in tokens."""
        return self.task.tuned if self.method else self.task.trained

    @property
    def sequences(self) -> int:
        """Sequences in each of its steps."""
        return self.task.tune_sequences if self.method else self.task.sequences

    @property
    def plans(self) -> dict[str, Callable[[int], Plan | None]]:
        """What is measured: the method's name → tokens to be read → what they turn by."""
        if self.model in BASELINES:
            return {self.model: lambda n: None}
        methods = METHODS if self.method is None else (self.method,)
        return {
            method.name: lambda n, method=method: method.plan(self.task.rope, self.task.trained, n)  # type: ignore[misc]
            for method in methods
        }

    def files(self, folder: Path) -> tuple[Path, Path]:
        """Where its checkpoint and its rows are kept."""
        parts = folder / "parts"
        return parts / f"{self.name}.safetensors", parts / f"{self.name}.json"

    def rows(self, folder: Path) -> list[Row]:
        """What was measured so far, in the order of `plans`; nothing where something else was asked for.

        Raises:
            RopeError: the file holds something else.
        """
        file = self.files(folder)[1]
        if not file.exists():
            return []
        try:
            kept = json.loads(file.read_text())
            return list(kept["rows"]) if kept["asked"] == self._asked() else []
        except (ValueError, TypeError, KeyError) as e:
            must = f"{file} must hold what was measured on a model"
            raise _checks.error("lab", must, f"something else ({e!r})", "Delete it, and it is measured again.") from e

    def done(self, folder: Path) -> bool:
        """Whether nothing is left to do."""
        return self.files(folder)[0].exists() and len(self.rows(folder)) == len(self.plans)

    def run(
        self, folder: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None
    ) -> list[Row]:
        """Train, or go on; measure what is not measured yet. Of several processes, only the first measures.

        Args:
            folder: what was done is kept in it.
            progress: told of every step.
            say: told when measuring begins.

        Returns:
            A row for each method: task, seed, model, method, and for each measure a list in the order of the task's
            lengths.

        Raises:
            RopeError: the folder holds a training of that name with another recipe, or on another text.
        """
        model = self._trained(folder, progress)
        return ranks.on_first(lambda: self._measured(model, folder, say))

    def _measured(self, model: LanguageModel, folder: Path, say: Callable[[str], None] | None) -> list[Row]:
        rows = self.rows(folder)
        left = list(self.plans.items())[len(rows) :]
        if left and say is not None:
            say(f"measuring {', '.join(method for method, _ in left)}")
        seen: dict[tuple[Plan | None, int], dict[str, Any]] = {}
        for method, plan in left:
            each = []
            for length in self.task.lengths:
                key = (plan(self.task.tokens(length)), length)
                if key not in seen:  # methods that do the same at a length are measured once
                    seen[key] = self.task.measure(model, *key)
                each.append(seen[key])
            values = {measure: [one[measure] for one in each] for measure in each[0]}
            rows.append({"task": self.task.name, "seed": self.seed, "model": self.model, "method": method, **values})
            write_json(self.files(folder)[1], {"asked": self._asked(), "rows": rows})
        return rows

    def _trained(self, folder: Path, progress: Progress | None) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LanguageModel(self._size())
        if self.method is not None:
            start = Part(self.task, self.seed, "trained")._trained(folder, None)
            model.load_state_dict(start.state_dict())
        # A fine-tune sees other sequences than the training; all of a seed see the same.
        stream = 2 * self.seed + (self.method is not None)
        batches = self.task.batches(stream, longest=self.longest, sequences=self.sequences)
        file = self.files(folder)[0]
        train(model, self._rope(), batches, self.recipe, file=file, about=self._about(), progress=progress)
        return model

    def _rope(self) -> Rope | None:
        """What it trains with: METHODS[0] is no scaling, and those of fine-tunes are plain ropes."""
        if self.model in BASELINES:
            return None
        return cast(Rope, (self.method or METHODS[0]).plan(self.task.rope, self.task.trained, self.longest))

    def _size(self) -> Size:
        size = self.task.size
        if self.model == "learned":
            longest = self.task.tokens(self.task.lengths[-1])
            return dataclasses.replace(size, absolute="learned", max_positions=longest)
        return dataclasses.replace(size, absolute="sinusoidal") if self.model == "sinusoidal" else size

    def _about(self) -> dict[str, Any]:
        return {**self.task.about(), "seed": self.seed, "longest": self.longest, "sequences": self.sequences}

    def _asked(self) -> dict[str, Any]:
        """What decides the rows, as JSON gives it back."""
        asked = {
            # A fine-tune is one of the model that it began with.
            "begins with": None if self.method is None else Part(self.task, self.seed, "trained")._training(),
            **self._training(),
            "lengths": list(self.task.lengths),
            "test_sequences": self.task.test_sequences,
            "plans": {
                name: [repr(plan(self.task.tokens(length))) for length in self.task.lengths]
                for name, plan in self.plans.items()
            },
        }
        return dict(json.loads(json.dumps(asked)))

    def _training(self) -> dict[str, Any]:
        return {
            "about": self._about(),
            "size": dataclasses.asdict(self._size()),
            "recipe": dataclasses.asdict(self.recipe),
        }


def parts(task: Task, seed: int, *, baselines: bool) -> list[Part]:
    """Everything of one task and one seed, in the order in which it can run."""
    return [
        Part(task, seed, "trained"),
        *(Part(task, seed, "tuned", method) for method in TUNES),
        *(Part(task, seed, name) for name in (BASELINES if baselines else ())),
    ]


def write_json(file: Path, value: Any) -> None:
    """Replace the file as a whole: a killed process, or a full disk, leaves the old one."""
    with writing(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
