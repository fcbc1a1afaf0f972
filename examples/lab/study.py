"""A study: trainings, their measurements, and the report. A study that is stopped at any moment continues where it was.

A training is two files: `x.safetensors`, its state after the last step, and `x.json`, what it is and what was measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import report
import torch
from methods import BASELINES, METHODS, TUNES, Method, Plan
from model import LanguageModel, Size
from tasks import Task
from training import Recipe, replaced, train

import ropewalk
from ropewalk import Rope

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of a study: one training of one task with one seed, followed by its measurements.

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
    def plans(self) -> dict[str, Callable[[int], Plan | None]]:
        """The methods to measure, by name. Each is a function that returns the rope for a number of tokens, or None."""
        if self.model in BASELINES:
            return {self.model: lambda n: None}
        methods = METHODS if self.method is None else (self.method,)
        return {
            method.name: lambda n, method=method: method.plan(self.task.rope, self.task.trained, n)
            for method in methods
        }

    def run(self, folder: Path) -> list[Row]:
        """Train, or continue the training, and then measure the missing methods.

        Returns:
            A row for each method: a dict with task, seed, model, method and, for each measure, a list of its values in
            the order of the task's lengths.
        """
        model = self._train(folder)
        plans = [plan(self.task.tokens(length)) for plan in self.plans.values() for length in self.task.lengths]
        measured = [repr(self.task), repr(plans)]  # everything that determines the measurements
        about = self._about(folder)
        rows: list[Row] = about["rows"] if about["measured"] == measured else []
        measured_at: dict[tuple[Plan | None, int], dict[str, Any]] = {}
        for method, plan in list(self.plans.items())[len(rows) :]:
            print(f"  measuring {method}", flush=True)
            by_length = []
            for length in self.task.lengths:
                key = (plan(self.task.tokens(length)), length)
                if key not in measured_at:  # methods with the same rope at a length are measured once
                    measured_at[key] = self.task.measure(model, *key)
                by_length.append(measured_at[key])
            values = {measure: [values_at[measure] for values_at in by_length] for measure in by_length[0]}
            rows.append({"task": self.task.name, "seed": self.seed, "model": self.model, "method": method, **values})
            write_json(self._file(folder, "json"), {**about, "measured": measured, "rows": rows})
        return rows

    def _file(self, folder: Path, suffix: str) -> Path:
        return folder / "parts" / f"{self.name}.{suffix}"

    def _about(self, folder: Path) -> dict[str, Any]:
        """Read the JSON file, which is written before the first step. It must be of the same training."""
        training = [repr(self._size()), repr(self._rope()), repr(self._recipes()), repr(self._data())]
        file = self._file(folder, "json")
        if not file.exists():
            self._file(folder, "safetensors").unlink(missing_ok=True)
            write_json(file, {"training": training, "measured": None, "rows": []})
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if about["training"] != training:
            raise SystemExit(f"{file} is of another training, or of another Python: choose another folder with --out.")
        return about

    def _train(self, folder: Path) -> LanguageModel:
        self._about(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LanguageModel(self._size())
        if self.method is not None:
            model.load_state_dict(Part(self.task, self.seed, "trained")._train(folder).state_dict())
        # Fine-tunes see other sequences than the first training. All fine-tunes of a seed see the same sequences.
        stream, data, recipe = 2 * self.seed + (self.method is not None), self._data(), self._recipes()[-1]
        batches = self.task.batches(stream, longest=data["longest"], sequences=data["sequences"])
        began = time.monotonic()

        def progress(done: int, loss: float) -> None:
            if done % 100 == 0 or done == recipe.steps:
                print(
                    f"  {done} of {recipe.steps} steps, loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True
                )

        train(model, self._rope(), batches, recipe, self._file(folder, "safetensors"), progress)
        return model

    def _recipes(self) -> list[Recipe]:
        """Return the recipe of the part's training, after that of the training from which a fine-tune starts."""
        return [self.task.recipe, *([self.task.tune_recipe] if self.method else [])]

    def _data(self) -> dict[str, Any]:
        task = self.task
        longest, sequences = (task.tuned, task.tune_sequences) if self.method else (task.trained, task.sequences)
        return {**task.about(), "seed": self.seed, "longest": longest, "sequences": sequences}

    def _rope(self) -> Rope | None:
        """Return the rope of the training: that of a fine-tune's method, the task's rope, or None for a baseline."""
        if self.model in BASELINES:
            return None
        method = self.method or METHODS[0]
        return cast(Rope, method.plan(self.task.rope, self.task.trained, self._data()["longest"]))

    def _size(self) -> Size:
        size = self.task.size
        if self.model == "learned":
            longest = self.task.tokens(self.task.lengths[-1])
            return dataclasses.replace(size, absolute="learned", max_positions=longest)
        return dataclasses.replace(size, absolute="sinusoidal") if self.model == "sinusoidal" else size


def parts_of(tasks: Sequence[Task], seeds: Sequence[int], *, baselines: bool) -> list[Part]:
    """Return all parts in the order in which they run. Fine-tunes come after the training that they start from."""
    return [
        part
        for seed in seeds
        for task in tasks
        for part in (
            Part(task, seed, "trained"),
            *(Part(task, seed, "tuned", method) for method in TUNES),
            *(Part(task, seed, name) for name in (BASELINES if baselines else ())),
        )
    ]


def run(tasks: Sequence[Task], seeds: Sequence[int], folder: Path, *, baselines: bool = False) -> dict[str, Any]:
    """Run the missing parts, and write the report: tables, findings, JSON, plots.

    Args:
        tasks, seeds: they run in this order, and each seed is completed before the next begins.
        folder: folder of all results. It is created if missing. A later run with the same folder continues this one,
            even after Ctrl-C or a kill. Only one run may use it at a time.
        baselines: whether to also train models without rotation.

    Returns:
        The content of `report.json`: the date, the versions, the number of threads, the tasks, and the rows that
        `Part.run` returns.
    """
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    print(f"All results are saved in {folder}. Stop with Ctrl-C, and continue with the same command.")
    parts, rows = parts_of(tasks, seeds, baselines=baselines), []
    for number, part in enumerate(parts, start=1):
        print(f"[{number}/{len(parts)}] {part.name}", flush=True)
        rows += part.run(folder)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"ropewalk": ropewalk.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "tasks": [report.describe_task(task) for task in tasks],
        "rows": rows,
    }
    write_json(folder / "report.json", result)
    print("\n".join(report.write(result, folder)))
    return result


def write_json(file: Path, value: Any) -> None:
    with replaced(file) as new:
        new.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
