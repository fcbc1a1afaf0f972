"""Run a study: order its parts, estimate the time, and write the report."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ropewalk
from ropewalk import _checks, plots
from ropewalk.tools.lab import files, ranks, report, tasks
from ropewalk.tools.lab.model import LanguageModel
from ropewalk.tools.lab.parts import Part, Row, parts, write_json
from ropewalk.tools.lab.progress import Progress
from ropewalk.tools.lab.tasks import Task
from ropewalk.tools.lab.train import train

Say = Callable[[str], None]

SEEDS = 3


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
        """Return all parts in the order in which they run: each seed is completed before the next begins."""
        return [
            part for seed in self.seeds for task in self.tasks for part in parts(task, seed, baselines=self.baselines)
        ]


def quick(seed: int, *, baselines: bool) -> Study:
    """Return the study of the copy task on one seed."""
    return Study([tasks.COPY], [seed], baselines)


def text(seed: int, *, baselines: bool) -> Study:
    """Return the study of the text task on one seed."""
    return Study([tasks.TEXT], [seed], baselines)


def full(seed: int, *, baselines: bool) -> Study:
    """Return the study of both tasks on three seeds."""
    return Study([tasks.COPY, tasks.TEXT], range(seed, seed + SEEDS), baselines)


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
        RopeError: matplotlib or safetensors is missing; the folder cannot be created or written; it contains another
            training with the same name; or another run uses it.
    """
    ranks.on_first(lambda: _prepare(folder))
    with ranks.hold_lock(folder / "lock", f"in {folder}"):
        return _run_in(study, folder, say if ranks.rank() == 0 else lambda line: None)


def _run_in(study: Study, folder: Path, say: Say) -> dict[str, Any]:
    began = time.monotonic()
    completed = ranks.on_first(lambda: [part.is_complete(folder) for part in study.parts()])
    missing = [part for part, is_done in zip(study.parts(), completed, strict=True) if not is_done]
    if missing:
        threads = f"{torch.get_num_threads()} threads"
        if ranks.count() > 1:
            threads = f"{ranks.count()} processes, {threads} in each"
        to_do = f"{len(missing)} of {len(study.parts())} parts to do"
        say(f"{threads}, {to_do}, saved in {folder}. Timing a few steps of each kind first.")
        expected = _minutes(estimate(missing, folder))
        say(f"This will take about {expected}. You can stop it with Ctrl-C and resume with the same command.")
    rows: list[Row] = []
    try:
        for number, part in enumerate(study.parts(), start=1):
            rows += _run(part, folder, say, f"[{number}/{len(study.parts())}] {part.name}", part not in missing)
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
        say(f"This run took {_minutes(time.monotonic() - began)}.")
    return result


def _run(part: Part, folder: Path, say: Say, label: str, is_complete: bool) -> list[Row]:
    if is_complete:
        return ranks.on_first(lambda: part.rows(folder))
    say(label)
    progress = Progress(part.name, sys.stderr) if ranks.rank() == 0 else None
    return part.run(folder, progress, lambda line: say(f"  {line}"))


def _report(result: dict[str, Any], folder: Path) -> list[str]:
    write_json(folder / "report.json", result)
    return list(report.write(result, folder))


def estimate(missing: Sequence[Part], folder: Path) -> float:
    """Estimate the seconds for these parts on this machine.

    A few training steps and the measurement of one method are timed for each task, with and without fine-tuning. The
    estimate includes the completed steps of an interrupted training.

    Args:
        missing: the parts to estimate.
        folder: folder for the checkpoints of the timed steps, which are deleted afterwards.
    """
    seconds: dict[tuple[Task, bool], tuple[float, float]] = {}
    total = 0.0
    for part in missing:
        kind = (part.task, part.method is not None)
        if kind not in seconds:
            seconds[kind] = _step_seconds(part, folder), ranks.on_first(functools.partial(_row_seconds, part))
        step, row = seconds[kind]
        total += step * part.recipe.steps + row * len(part.plans)
    return total


def _step_seconds(part: Part, folder: Path, *, steps: int = 8) -> float:
    """Return the duration of a training step of the part, in seconds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # so that every process has the same model
        model = LanguageModel(part.task.size)
    batches = part.task.batches(0, longest=part.longest, sequences=part.sequences)
    recipe = dataclasses.replace(part.recipe, steps=steps)
    timed = Path(
        ranks.on_first(lambda: tempfile.mkdtemp(prefix=".timed-", dir=folder))
    )  # a folder that all processes share
    try:
        file = timed / "timed.safetensors"
        return train(model, part.task.rope, batches, recipe, file=file, about={}).seconds / steps
    finally:
        if ranks.rank() == 0:
            shutil.rmtree(timed, ignore_errors=True)


def _row_seconds(part: Part) -> float:
    """Return how many seconds it takes to measure one method at all lengths."""
    task = part.task
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(task.size)
    began = time.perf_counter()
    for length in task.lengths:
        task.measure(model, task.rope, length)
    return time.perf_counter() - began


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _prepare(folder: Path) -> None:
    plots.blank(height=1.0)  # raises now if matplotlib is missing
    files.load_safetensors()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _checks.error(
            "lab", "it must be possible to create the folder", f"{str(folder)!r} ({e.strerror})", "Pass another path."
        ) from e
