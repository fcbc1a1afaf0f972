"""Test trainings that are killed, and those with several processes: losses equal those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import processes
import tiny_lab
from ropewalk.tools.lab import checkpoint, study
from ropewalk.tools.lab.study import Study

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}

# Relative. The sums of a batch are added in another order, which moves a loss by an ulp or two of float32 (1.2e-7), and
# every step begins with the differences of those before. Measured over these 14 steps: 2.3e-7.
ROUNDING = 1e-6

# File → of each run on it how its processes ended, and the number of steps in the file.
Outcomes = dict[str, list[tuple[list[str], int]]]


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    """Run the worker. Return its folder and the outcome of every run."""
    folder = tmp_path_factory.mktemp("ranks")
    ran = subprocess.run(
        [sys.executable, str(HERE / "ranks_worker.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=2 * processes.PATIENCE,
        env=ENVIRONMENT,
    )
    assert ran.returncode == 0, ran.stderr
    return folder, json.loads(ran.stdout)


def read(worked: tuple[Path, Outcomes], name: str) -> tuple[dict[str, Any], checkpoint.State]:
    return checkpoint.read(worked[0] / f"{name}.safetensors")


@pytest.mark.parametrize(("several", "alone"), [("2", "1"), ("2 tied", "1 tied"), ("others", "1")])
def test_losses_are_those_of_one_process(worked: tuple[Path, Outcomes], several: str, alone: str) -> None:
    """No number of processes divides the batches, and each process has a different share of the targets."""
    (training, found), (wanted_training, wanted) = read(worked, several), read(worked, alone)
    assert found.losses == pytest.approx(wanted.losses, rel=ROUNDING)
    assert min(wanted.losses) < 0.8 * wanted.losses[0]  # it learns, so a wrong gradient shows
    assert training == wanted_training
    assert {name: value.shape for name, value in found.tensors.items()} == {
        name: value.shape for name, value in wanted.tensors.items()
    }


@pytest.mark.parametrize(
    ("killed", "undisturbed", "ends", "steps"),
    [
        ("killed alone", "1", ["SIGKILL"], [4, 6, 14]),
        ("killed", "2", ["SIGKILL", "traceback"], [8, 10, 14]),  # the traceback is that of a lost connection
    ],
)
def test_killed_and_resumed_is_bitwise(
    worked: tuple[Path, Outcomes], killed: str, undisturbed: str, ends: list[str], steps: list[int]
) -> None:
    """A process is killed in a step, and while the file is written: only that step is lost."""
    outcomes = worked[1][killed]
    assert [sorted(end.split(":")[0] for end in found) for found, _ in outcomes[:-1]] == [ends] * 2
    assert [found for _, found in outcomes] == steps
    (_, found), (_, wanted) = read(worked, killed), read(worked, undisturbed)
    assert found.losses == wanted.losses
    for name, value in wanted.tensors.items():
        assert torch.equal(found.tensors[name], value), name


def test_resumed_by_other_numbers_of_processes(worked: tuple[Path, Outcomes]) -> None:
    """The numbers are 1, 3 and 1. test_losses_are_those_of_one_process checks the result."""
    assert [steps for _, steps in worked[1]["others"]] == [2, 7, 14]


def test_only_the_first_process_reports_an_error_of_all(worked: tuple[Path, Outcomes]) -> None:
    ends, steps = worked[1]["disagree"][0]
    message = (
        "lab: every process must train the same model on the same data, got processes that differ in initial weights. "
    )
    assert ends[0].startswith(f"RopeError: {message}")
    assert ends[1].startswith(f"FirstFailedError: {message}")
    assert steps == 0


def test_a_full_disk_leaves_the_checkpoint_before(worked: tuple[Path, Outcomes]) -> None:
    folder, outcomes = worked
    ends, steps = outcomes["full"][0]
    assert ends[0].startswith("OSError: ")
    assert str(folder / "full.safetensors") in ends[0]
    assert ends[1].startswith("FirstFailedError: ")
    assert steps == 4


def test_the_command(tmp_path: Path) -> None:
    """Run `torchrun -m ropewalk lab --quick` with two processes. There is one report, with the rows of one process."""
    folder = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*torchrun, str(HERE / "torchrun_worker.py"), "lab", "--quick", "--out", str(folder)]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=processes.PATIENCE, env=ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("2 processes, 1 threads in each, 6 of 6 parts to do, saved in ")
    assert process.stdout.count((folder / "report.txt").read_text()) == 1
    assert process.stdout.count("The report, JSON and plots are in") == 1
    result = json.loads((folder / "report.json").read_text())
    assert result["processes"] == 2
    wanted = study.run(Study([tiny_lab.COPY], [0]), tmp_path / "one", lambda line: None)["rows"]
    assert [row["method"] for row in result["rows"]] == [row["method"] for row in wanted]
    for row, one in zip(result["rows"], wanted, strict=True):
        np.testing.assert_allclose(row["loss"], one["loss"], rtol=ROUNDING)
    parts = [{path.name for path in (at / "parts").iterdir()} for at in (folder, tmp_path / "one")]
    assert parts[0] == parts[1]
    assert {path.suffix for path in folder.iterdir()} == {"", ".json", ".txt", ".png"}
