"""A study: trainings, their measurements, and the report. A study that is stopped at any moment continues where it was.

Checkpoints and measurements are saved. A process that is killed loses only its current training step or measurement.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import torch

import ropewalk
from ropewalk import Rope, _checks, plots
from ropewalk.tools import _files
from ropewalk.tools.lab import ranks, report, tasks
from ropewalk.tools.lab.methods import BASELINES, METHODS, TUNES, Method, Plan
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.tasks import Task
from ropewalk.tools.lab.train import Recipe, train

Say = Callable[[str], None]
Row = dict[str, Any]

SEEDS = 3


class Progress:
    """Show the progress of one training: a line that is updated on a terminal, or periodic lines otherwise.

    Args:
        label: a short name of the training.
        stream: output stream, usually `sys.stderr`.
        every: seconds between lines if stream is not a terminal. On a terminal, the line is updated at most 10 times
            per second.
    """

    def __init__(self, label: str, stream: TextIO, *, every: float = 60.0) -> None:
        self._label, self._stream = label, stream
        self._terminal = stream.isatty()
        self._every = 0.1 if self._terminal else every
        self._began = self._shown = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, steps: int, loss: float) -> None:
        """Report the number of completed steps, and the loss of the last one in nats."""
        now = time.monotonic()
        if self._first is None:
            self._first = done - 1  # steps of an earlier run do not count for the time left
        if now - self._shown < self._every and done < steps:
            return
        self._shown = now
        left = (now - self._began) / (done - self._first) * (steps - done)
        text = f"{self._label}: {done} of {steps}, loss {loss:.3f}, "
        text += f"{_clock(left)} left" if done < steps else f"{_clock(now - self._began)}"
        if self._terminal:
            filled = 24 * done // steps
            bar = "█" * filled + "·" * (24 - filled)
            self._stream.write(f"\r{bar} {text}\x1b[K" + ("\n" if done == steps else ""))
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


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
    def recipe(self) -> Recipe:
        """The recipe of the part's training."""
        return self.task.tune_recipe if self.method else self.task.recipe

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
        return tuple(folder / "parts" / f"{self.name}{end}" for end in (".safetensors", "-measured.json"))  # type: ignore[return-value]

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
            return list(content["rows"]) if content["settings"] == self._settings() else []
        except (ValueError, TypeError, KeyError) as e:
            must = f"{file} must contain measurements of a model"
            raise _checks.error("lab", must, f"something else ({e!r})", "Delete it to measure again.") from e

    def is_complete(self, folder: Path) -> bool:
        """Return whether the training and all measurements are complete."""
        return self.files(folder)[0].exists() and len(self.rows(folder)) == len(self.plans)

    def run(self, folder: Path, progress: Progress | None = None, say: Say | None = None) -> list[Row]:
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

    def _measure(self, model: LanguageModel, folder: Path, say: Say | None) -> list[Row]:
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
            _write_json(self.files(folder)[1], {"settings": self._settings(), "rows": rows})
        return rows

    def _train(self, folder: Path, progress: Progress | None) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LanguageModel(self._size())
        if self.method is not None:
            start = Part(self.task, self.seed, "trained")._train(folder, None)
            model.load_state_dict(start.state_dict())
        # Fine-tunes see other sequences than the first training. All fine-tunes of a seed see the same sequences.
        stream, about = 2 * self.seed + (self.method is not None), self._about()
        batches = self.task.batches(stream, longest=about["longest"], sequences=about["sequences"])
        file = self.files(folder)[0]
        train(model, self._rope(about["longest"]), batches, self.recipe, file=file, about=about, progress=progress)
        return model

    def _rope(self, longest: int) -> Rope | None:
        """Return the rope of the training: that of a fine-tune's method, the task's rope, or None for a baseline."""
        if self.model in BASELINES:
            return None
        return cast(Rope, (self.method or METHODS[0]).plan(self.task.rope, self.task.trained, longest))

    def _size(self) -> Size:
        size = self.task.size
        if self.model == "learned":
            longest = self.task.tokens(self.task.lengths[-1])
            return dataclasses.replace(size, absolute="learned", max_positions=longest)
        return dataclasses.replace(size, absolute="sinusoidal") if self.model == "sinusoidal" else size

    def _about(self) -> dict[str, Any]:
        task = self.task
        longest, sequences = (task.tuned, task.tune_sequences) if self.method else (task.trained, task.sequences)
        return {**task.about(), "seed": self.seed, "longest": longest, "sequences": sequences}

    def _settings(self) -> list[str]:
        """Return everything that determines the measurements: the task, the data, and the ropes at each length."""
        plans = [plan(self.task.tokens(length)) for plan in self.plans.values() for length in self.task.lengths]
        return [repr(self.task), repr(self._about()), repr(plans)]


@dataclass(frozen=True)
class Study:
    """The settings of a study.

    Args:
        tasks: the tasks, in the order in which they run for each seed.
        seeds: the seeds, in the order in which they run.
        baselines: whether to also train models without rotation.
    """

    tasks: Sequence[Task]
    seeds: Sequence[int]
    baselines: bool = False

    def parts(self) -> list[Part]:
        """Return all parts in the order in which they run.

        Each seed is completed before the next begins. Fine-tunes come after the training that they start from.
        """
        return [
            part
            for seed in self.seeds
            for task in self.tasks
            for part in (
                Part(task, seed, "trained"),
                *(Part(task, seed, "tuned", method) for method in TUNES),
                *(Part(task, seed, name) for name in (BASELINES if self.baselines else ())),
            )
        ]


def choose(task: str | None, seed: int, *, baselines: bool) -> Study:
    """Return the study of the task "copy" or "text" on one seed, or of both tasks on three seeds."""
    if task is None:
        return Study([tasks.COPY, tasks.TEXT], range(seed, seed + SEEDS), baselines)
    return Study([{"copy": tasks.COPY, "text": tasks.TEXT}[task]], [seed], baselines)


def run(study: Study, folder: Path, say: Say) -> dict[str, Any]:
    """Run the missing parts, and write the report: tables, findings, JSON, plots.

    Several processes (`ranks.process_group`) must all call this with the same arguments. They train each model
    together. The first one selects the missing parts, measures, and writes the report.

    Args:
        study: the settings.
        folder: folder of all results. It is created if missing. A later run with the same folder resumes this one,
            even after Ctrl-C or a kill.
        say: called with each line of output, in the first process.

    Returns:
        The content of `report.json`: the date, the versions, the number of processes and of threads in each, the
        duration of this run in seconds, the tasks, and the rows that `Part.run` returns.

    Raises:
        RopeError: matplotlib is missing; the folder contains another training with the same name; or another run uses
            the folder.
        OSError: the folder cannot be created or written.
    """
    plots.blank(height=1.0)  # raises now if matplotlib is missing
    with ranks.hold_lock(folder / "lock", f"in {folder}"):
        return _run_in(study, folder, say if ranks.rank() == 0 else lambda line: None)


def _run_in(study: Study, folder: Path, say: Say) -> dict[str, Any]:
    began, parts = time.monotonic(), study.parts()
    completed = ranks.on_first(lambda: [part.is_complete(folder) for part in parts])
    if missing := completed.count(False):
        threads = f"{torch.get_num_threads()} threads"
        if ranks.count() > 1:
            threads = f"{ranks.count()} processes, {threads} in each"
        say(f"{threads}, {missing} of {len(parts)} parts to do, saved in {folder}.")
        say("You can stop it with Ctrl-C and resume with the same command.")
    rows: list[Row] = []
    try:
        for number, (part, is_complete) in enumerate(zip(parts, completed, strict=True), start=1):
            if is_complete:
                rows += ranks.on_first(lambda part=part: part.rows(folder))  # type: ignore[misc]
                continue
            say(f"[{number}/{len(parts)}] {part.name}")
            progress = Progress(part.name, sys.stderr) if ranks.rank() == 0 else None
            rows += part.run(folder, progress, lambda line: say(f"  {line}"))
    except KeyboardInterrupt:
        say("")
        say(f"Stopped. The completed work is saved in {folder}. Resume with the same command.")
        raise
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"ropewalk": ropewalk.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "processes": ranks.count(),
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - began, 1),
        "tasks": [report.describe_task(task) for task in study.tasks],
        "rows": rows,
    }
    for line in ranks.on_first(lambda: _report(result, folder)):
        say(line)
    if missing:
        say(f"This run took {(time.monotonic() - began) / 60:.1f} minutes.")
    return result


def _report(result: dict[str, Any], folder: Path) -> list[str]:
    _write_json(folder / "report.json", result)
    return report.write(result, folder)


def _write_json(file: Path, value: Any) -> None:
    with _files.replaced(file) as new:
        new.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
