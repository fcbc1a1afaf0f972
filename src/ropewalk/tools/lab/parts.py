"""The parts of a study: each is one training, followed by its measurements.

Checkpoints and measurements are saved. A process that is killed loses only its current training step or measurement.
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
from ropewalk.tools.lab import ranks
from ropewalk.tools.lab.files import atomic_write
from ropewalk.tools.lab.measure import Plan
from ropewalk.tools.lab.methods import METHODS, TUNES, Method
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.progress import Progress
from ropewalk.tools.lab.tasks import Task
from ropewalk.tools.lab.train import Recipe, train

BASELINES = {
    "learned": "a learned vector for each absolute position; those beyond the trained length keep their initial values",
    "sinusoidal": "the sines and cosines of the first Transformer, added to the embeddings",
    "no positions": "nothing but the causal mask",
}
"""Models that are trained without rotation: name → how the model gets positions."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One training of one task with one seed.

    Args:
        task, seed: the task and the seed.
        model: "trained" for the model with rotation, "tuned" for a fine-tune of it, or a key of BASELINES.
        method: the method with which a fine-tune is trained. None for other models.
    """

    task: Task
    seed: int
    model: str
    method: Method | None = None

    @property
    def name(self) -> str:
        """The name of the part and of its files."""
        words = [self.task.name, str(self.seed), self.model, *([self.method.name] if self.method else [])]
        return "-".join(words).replace(" ", "-")

    @property
    def recipe(self) -> Recipe:
        """The recipe of the part's training."""
        return self.task.tune_recipe if self.method else self.task.recipe

    @property
    def longest(self) -> int:
        """The longest sequence of the part's training, in tokens."""
        return self.task.tuned if self.method else self.task.trained

    @property
    def sequences(self) -> int:
        """The number of sequences in each training step."""
        return self.task.tune_sequences if self.method else self.task.sequences

    @property
    def plans(self) -> dict[str, Callable[[int], Plan | None]]:
        """The methods to measure, by name. Each is a function that returns the rope for a number of tokens, or None."""
        if self.model in BASELINES:
            return {self.model: lambda n: None}
        methods = METHODS if self.method is None else (self.method,)
        return {
            method.name: lambda n, method=method: method.plan(self.task.rope, self.task.trained, n)  # type: ignore[misc]
            for method in methods
        }

    def files(self, folder: Path) -> tuple[Path, Path]:
        """Return the paths of the part's checkpoint and of the file with its measurements."""
        parts = folder / "parts"
        return parts / f"{self.name}.safetensors", parts / f"{self.name}.json"

    def rows(self, folder: Path) -> list[Row]:
        """Read the measurements so far: a row for each method, in the order of `plans`.

        Rows that were measured with other settings are ignored.

        Raises:
            RopeError: the file contains something other than measurements.
        """
        file = self.files(folder)[1]
        if not file.exists():
            return []
        try:
            content = json.loads(file.read_text())
            return list(content["rows"]) if content["asked"] == self._row_settings() else []
        except (ValueError, TypeError, KeyError) as e:
            must = f"{file} must contain measurements of a model"
            raise _checks.error("lab", must, f"something else ({e!r})", "Delete it to measure again.") from e

    def is_complete(self, folder: Path) -> bool:
        """Return whether the training and all measurements are complete."""
        return self.files(folder)[0].exists() and len(self.rows(folder)) == len(self.plans)

    def run(
        self, folder: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None
    ) -> list[Row]:
        """Train, or resume the training, and then measure the missing methods. Only the first process measures.

        Args:
            folder: folder of checkpoints and measurements.
            progress: receives every training step.
            say: called with a line when measuring begins.

        Returns:
            A row for each method: a dict with task, seed, model, method and, for each measure, a list of its values in
            the order of the task's lengths.

        Raises:
            RopeError: the folder contains a training with that name, but with another recipe or on another text.
        """
        model = self._train(folder, progress)
        return ranks.on_first(lambda: self._measure(model, folder, say))

    def _measure(self, model: LanguageModel, folder: Path, say: Callable[[str], None] | None) -> list[Row]:
        rows = self.rows(folder)
        missing = list(self.plans.items())[len(rows) :]
        if missing and say is not None:
            say(f"measuring {', '.join(method for method, _ in missing)}")
        measured_at: dict[tuple[Plan | None, int], dict[str, Any]] = {}
        for method, plan in missing:
            by_length = []
            for length in self.task.lengths:
                key = (plan(self.task.tokens(length)), length)
                if key not in measured_at:  # methods with the same rope at a length are measured once
                    measured_at[key] = self.task.measure(model, *key)
                by_length.append(measured_at[key])
            values = {measure: [values_at[measure] for values_at in by_length] for measure in by_length[0]}
            rows.append({"task": self.task.name, "seed": self.seed, "model": self.model, "method": method, **values})
            write_json(self.files(folder)[1], {"asked": self._row_settings(), "rows": rows})
        return rows

    def _train(self, folder: Path, progress: Progress | None) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LanguageModel(self._size())
        if self.method is not None:
            start = Part(self.task, self.seed, "trained")._train(folder, None)
            model.load_state_dict(start.state_dict())
        # Fine-tunes see other sequences than the first training. All fine-tunes of a seed see the same sequences.
        stream = 2 * self.seed + (self.method is not None)
        batches = self.task.batches(stream, longest=self.longest, sequences=self.sequences)
        file = self.files(folder)[0]
        train(model, self._rope(), batches, self.recipe, file=file, about=self._about(), progress=progress)
        return model

    def _rope(self) -> Rope | None:
        """Return the rope of the training: that of a fine-tune's method, the task's rope, or None for a baseline."""
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

    def _row_settings(self) -> dict[str, Any]:
        """Return everything that determines the measurements, as read back from JSON, for comparison with a file."""
        settings = {
            # A fine-tune also depends on the model from which it starts.
            "begins with": None if self.method is None else Part(self.task, self.seed, "trained")._training_settings(),
            **self._training_settings(),
            "lengths": list(self.task.lengths),
            "test_sequences": self.task.test_sequences,
            "plans": {
                name: [repr(plan(self.task.tokens(length))) for length in self.task.lengths]
                for name, plan in self.plans.items()
            },
        }
        return dict(json.loads(json.dumps(settings)))

    def _training_settings(self) -> dict[str, Any]:
        return {
            "about": self._about(),
            "size": dataclasses.asdict(self._size()),
            "recipe": dataclasses.asdict(self.recipe),
        }


def parts(task: Task, seed: int, *, baselines: bool) -> list[Part]:
    """Return all parts of one task and one seed. Fine-tunes come after the training that they start from."""
    return [
        Part(task, seed, "trained"),
        *(Part(task, seed, "tuned", method) for method in TUNES),
        *(Part(task, seed, name) for name in (BASELINES if baselines else ())),
    ]


def write_json(file: Path, value: Any) -> None:
    """Replace a JSON file atomically. If the process is killed or the disk is full, the old file does not change."""
    with atomic_write(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
