"""The whole study: what runs in which order, how long it will take, and the report of what there is."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ropewalk
from ropewalk import _checks, _lock, plots
from ropewalk.lab import report, tasks
from ropewalk.lab.model import LanguageModel
from ropewalk.lab.parts import Part, Row, parts, write_json
from ropewalk.lab.progress import Progress
from ropewalk.lab.tasks import Task
from ropewalk.lab.train import train

Say = Callable[[str], None]

SEEDS = 3


@dataclass(frozen=True)
class Study:
    """What to run.

    Args:
        tasks: in this order for each seed.
        seeds: in this order.
        baselines: also train models without rotation.
    """

    tasks: Sequence[Task]
    seeds: Sequence[int]
    baselines: bool = False

    def parts(self) -> list[Part]:
        """In the order in which they run: a seed is finished before the next begins."""
        return [
            part for seed in self.seeds for task in self.tasks for part in parts(task, seed, baselines=self.baselines)
        ]


def quick(seed: int, *, baselines: bool) -> Study:
    """The copy task on one seed."""
    return Study([tasks.COPY], [seed], baselines)


def text(seed: int, *, baselines: bool) -> Study:
    """The text on one seed."""
    return Study([tasks.TEXT], [seed], baselines)


def full(seed: int, *, baselines: bool) -> Study:
    """Both tasks on three seeds."""
    return Study([tasks.COPY, tasks.TEXT], range(seed, seed + SEEDS), baselines)


def run(study: Study, folder: Path, say: Say) -> dict[str, Any]:
    """Run what is not done yet, and write the report: tables, words, JSON, pictures.

    Args:
        folder: where everything is kept; made if it is not there. Running again with the same folder goes on where
            the last run stopped, also after Ctrl-C or a kill.
        say: called with each line for the reader.

    Returns:
        What `report.json` holds: date, versions, threads, tasks, rows (`Part.run`), seconds of this run.

    Raises:
        RopeError: matplotlib or safetensors is missing; the folder cannot be made or written, or holds another
            training under the same name; another process works in it.
    """
    plots.blank(height=1.0)  # so that a missing matplotlib is told now
    _make(folder)
    with _lock.held("lab", folder / "lock", f"in {folder}"):
        return _run_in(study, folder, say)


def _run_in(study: Study, folder: Path, say: Say) -> dict[str, Any]:
    began = time.monotonic()
    left = [part for part in study.parts() if not part.done(folder)]
    if left:
        say(f"{torch.get_num_threads()} threads, {len(left)} of {len(study.parts())} parts to do, kept in {folder}")
        say(f"This will take about {_minutes(estimate(left))}. Ctrl-C stops it; the same command goes on from there.")
    rows: list[Row] = []
    try:
        for number, part in enumerate(study.parts(), start=1):
            rows += _run(part, folder, say, f"[{number}/{len(study.parts())}] {part.name}")
    except KeyboardInterrupt:
        say("")
        say(f"Stopped. What is done is kept in {folder}; the same command goes on from there.")
        raise
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"ropewalk": ropewalk.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - began, 1),
        "tasks": [report.described(task) for task in study.tasks],
        "rows": rows,
    }
    write_json(folder / "report.json", result)
    for line in report.written(result, folder):
        say(line)
    if left:
        say(f"This run took {_minutes(time.monotonic() - began)}.")
    return result


def _run(part: Part, folder: Path, say: Say, label: str) -> list[Row]:
    if part.done(folder):
        return part.rows(folder)
    say(label)
    return part.run(folder, Progress(part.name, sys.stderr), lambda line: say(f"  {line}"))


def estimate(left: Sequence[Part]) -> float:
    """Seconds that these parts will take on this machine: a few steps and measurements of each kind are timed.

    Steps of an interrupted training that are done already are counted again.
    """
    seconds: dict[tuple[Task, bool], tuple[float, float]] = {}
    total = 0.0
    for part in left:
        kind = (part.task, part.method is not None)
        if kind not in seconds:
            seconds[kind] = _step_seconds(part), _row_seconds(part)
        step, row = seconds[kind]
        total += step * part.recipe.steps + row * len(part.plans)
    return total


def _step_seconds(part: Part, *, steps: int = 8) -> float:
    """A step of the training, checkpoint included."""
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(part.task.size)
    batches = part.task.batches(0, longest=part.longest, sequences=part.sequences)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timed.safetensors"
        recipe = dataclasses.replace(part.recipe, steps=steps)
        return train(model, part.task.rope, batches, recipe, file=file, about={}).seconds / steps


def _row_seconds(part: Part) -> float:
    """All lengths of one method."""
    task = part.task
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(task.size)
    began = time.perf_counter()
    for length in task.lengths:
        task.measure(model, task.rope, length)
    return time.perf_counter() - began


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _checks.error(
            "lab", "the folder must be one that can be made", f"{str(folder)!r} ({e.strerror})", "Name another."
        ) from e
