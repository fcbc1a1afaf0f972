"""The parts of a study. Each is one training with its measurements, and its results are saved.

A killed process loses only its current training step or measurement.
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
    "learned": "a learned vector for each absolute position; those beyond the trained length keep their initial values",
    "sinusoidal": "the sines and cosines of the first Transformer, added to the embeddings",
    "no positions": "nothing but the causal mask",
}
"""Separate trainings without rotation: name → how the model gets positions."""

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
        """Name of the part and of its files."""
        words = [self.task.name, str(self.seed), self.model, *([self.method.name] if self.method else [])]
        return "-".join(words).replace(" ", "-")

    @property
    def recipe(self) -> Recipe:
        """Recipe of its training."""
        return self.task.tune_recipe if self.method else self.task.recipe

    @property
    def longest(self) -> int:
        """Longest sequence of its training, in tokens."""
        return self.task.tuned if self.method else self.task.trained

    @property
    def sequences(self) -> int:
        """Number of sequences in each training step."""
        return self.task.tune_sequences if self.method else self.task.sequences

    @property
    def plans(self) -> dict[str, Callable[[int], Plan | None]]:
        """Measured methods: name → function from the number of tokens to their rope."""
        if self.model in BASELINES:
            return {self.model: lambda n: None}
        methods = METHODS if self.method is None else (self.method,)
        return {
            method.name: lambda n, method=method: method.plan(self.task.rope, self.task.trained, n)  # type: ignore[misc]
            for method in methods
        }

    def files(self, folder: Path) -> tuple[Path, Path]:
        """Paths of its checkpoint and its rows."""
        parts = folder / "parts"
        return parts / f"{self.name}.safetensors", parts / f"{self.name}.json"

    def rows(self, folder: Path) -> list[Row]:
        """Read the rows measured so far, in the order of `plans`. Rows of other settings are ignored.

        Raises:
            RopeError: the file has other content.
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
        """Whether the part is complete."""
        return self.files(folder)[0].exists() and len(self.rows(folder)) == len(self.plans)

    def run(
        self, folder: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None
    ) -> list[Row]:
        """Train or resume training, then measure the missing rows. Of several processes, only the first measures.

        Args:
            folder: folder of checkpoints and rows.
            progress: receives every training step.
            say: called with a line when measuring begins.

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
                if key not in seen:  # methods with the same rope at a length are measured once
                    seen[key] = self.task.measure(model, *key)
                each.append(seen[key])
            values = {measure: [measured[measure] for measured in each] for measure in each[0]}
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
        # Fine-tunes use other sequences than the training. All fine-tunes of a seed use the same ones.
        stream = 2 * self.seed + (self.method is not None)
        batches = self.task.batches(stream, longest=self.longest, sequences=self.sequences)
        file = self.files(folder)[0]
        train(model, self._rope(), batches, self.recipe, file=file, about=self._about(), progress=progress)
        return model

    def _rope(self) -> Rope | None:
        """Rope of its training. METHODS[0] is no scaling, and the methods of fine-tunes are plain ropes."""
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
        """Return everything that determines the rows, after a round trip through JSON."""
        asked = {
            # A fine-tune also depends on the model that it started from.
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
    """Return all parts of one task and one seed, in an order in which they can run."""
    return [
        Part(task, seed, "trained"),
        *(Part(task, seed, "tuned", method) for method in TUNES),
        *(Part(task, seed, name) for name in (BASELINES if baselines else ())),
    ]


def write_json(file: Path, value: Any) -> None:
    """Replace a JSON file atomically. If the process is killed or the disk is full, the old file remains."""
    with writing(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
