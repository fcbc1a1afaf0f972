"""Test trainings with several processes: losses equal those of one, and a killed process loses few steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import processes
import tiny_lab
from ropewalk import RopeError
from ropewalk.tools.lab import checkpoint, ranks, shards, study
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.study import Study
from ropewalk.tools.lab.train import Recipe, train

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}

# Relative. The sums of a batch are added in another order, which moves a loss by an ulp or two of float32 (1.2e-7), and
# every step begins with the differences of those before. Measured over these 14 steps: 2.3e-7.
ROUNDING = 1e-6

# File → of each run on it how its processes ended, [steps in the file, steps in the shards], the step it began with.
Outcomes = dict[str, list[tuple[list[str], list[int], int | None]]]


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


def read(worked: tuple[Path, Outcomes], name: str) -> checkpoint.Checkpoint:
    return checkpoint.read(worked[0] / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("several", "alone"), [("2", "1"), ("4", "1"), ("4 tied", "1 tied"), ("others", "1")], ids=lambda name: str(name)
)
def test_losses_are_those_of_one_process(worked: tuple[Path, Outcomes], several: str, alone: str) -> None:
    """No number of processes divides the batches, and each process has a different share of the targets."""
    found, wanted = read(worked, several), read(worked, alone)
    assert found.losses == pytest.approx(wanted.losses, rel=ROUNDING)
    assert min(wanted.losses) < 0.8 * wanted.losses[0]  # it learns, so a wrong gradient shows
    assert found.identity == wanted.identity
    assert found.tensors.keys() == wanted.tensors.keys()


def test_killed_and_resumed_is_bitwise(worked: tuple[Path, Outcomes]) -> None:
    """Processes are killed in a step, while writing a shard, and before replacing the manifest and the final file."""
    outcomes = worked[1]["killed"]
    assert [sorted(end.split(":")[0] for end in ends) for ends, _, _ in outcomes] == [
        *[["RopeError", "SIGKILL"]] * 4,
        *[["done", "done"]] * 2,
    ]
    assert [steps for _, steps, _ in outcomes] == [[0, 6], [0, 9], [0, 12], [0, 14], [14, 0], [14, 0]]
    assert [began for _, _, began in outcomes] == [0, 6, 9, 12, None, None]
    found, wanted = read(worked, "killed"), read(worked, "2")
    assert found.losses == wanted.losses
    for name, value in wanted.tensors.items():
        assert torch.equal(found.tensors[name], value), name


def test_resumed_by_other_numbers_of_processes(worked: tuple[Path, Outcomes]) -> None:
    """The numbers are 1, 4, 2, 1, 4 and 1. test_losses_are_those_of_one_process checks the result."""
    outcomes = worked[1]["others"]
    assert [steps for _, steps, _ in outcomes] == [[2, 0], [2, 3], [2, 6], [8, 0], [8, 12], [14, 0]]
    assert [began for _, _, began in outcomes] == [0, 2, 3, 6, 8, 12]
    assert all(ends.count("SIGKILL") == 1 for ends, _, _ in outcomes[:-1])
    assert not shards.folder_of(worked[0] / "others.safetensors").exists()


def test_an_error_of_one_process_ends_all(worked: tuple[Path, Outcomes]) -> None:
    for who, (ends, steps, _) in zip((1, 0), worked[1]["error"], strict=True):
        assert "MemoryError: this process has no memory left" in ends[who]
        lost = f"RopeError: lab: all processes must run until the end, got process {1 - who} without a connection to "
        assert ends[1 - who].startswith(lost)
        assert steps == [0, 3]


def test_only_the_first_process_reports_an_error_of_all(worked: tuple[Path, Outcomes]) -> None:
    ends, steps, _ = worked[1]["disagree"][0]
    message = (
        "lab: every process must train the same model on the same data, got processes that differ in initial weights. "
    )
    assert ends[0].startswith(f"RopeError: {message}")
    assert ends[1].startswith(f"FirstFailedError: {message}")
    assert steps == [0, 0]


def test_a_full_disk_of_one_process_leaves_the_checkpoint_before(worked: tuple[Path, Outcomes]) -> None:
    folder, outcomes = worked
    ends, steps, _ = outcomes["full"][0]
    parent = folder / "full.safetensors.shards"
    message = f"lab: {parent} must be a folder that every process can write to, got OSError in process 1: "
    assert ends[0].startswith(f"RopeError: {message}")
    assert ends[1].startswith(f"FirstFailedError: {message}")
    assert steps == [0, 3]
    assert sorted(path.name for path in parent.iterdir()) == ["last.json", "step-00000003"]


def test_nothing_else_is_left(worked: tuple[Path, Outcomes]) -> None:
    left = {path.name for path in worked[0].iterdir() if not path.name.startswith("rendezvous")}
    finished = {f"{name}.safetensors" for name in ("1", "2", "4", "1 tied", "4 tied", "killed", "others")}
    # A process that was killed or lost has removed no lock file; such a file locks nothing.
    assert {name for name in left if not name.endswith(".lock")} == finished | {
        f"{name}.safetensors.shards" for name in ("error", "full")
    }


class TestBroken:
    """A checkpoint of several processes that differs from what was written is refused."""

    @pytest.fixture
    def file(self, worked: tuple[Path, Outcomes], tmp_path: Path) -> Path:
        shutil.copytree(worked[0] / "error.safetensors.shards", tmp_path / "x.safetensors.shards")
        return tmp_path / "x.safetensors"

    def test_whole(self, file: Path) -> None:
        last = shards.read(file)
        assert last is not None
        assert (len(last.losses), len(last.sha256)) == (3, 2)
        assert shards.read(file.with_name("y")) is None

    def test_a_flipped_bit(self, file: Path) -> None:
        shard = next(shards.folder_of(file).glob("step-*/*"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        with pytest.raises(RopeError, match=rf"must hold the files that it lists, .* changed: {shard.name}\. Delete"):
            shards.read(file)

    @pytest.mark.parametrize("more", [True, False])
    def test_a_file_too_many_or_too_few(self, file: Path, more: bool) -> None:
        shard = next(shards.folder_of(file).glob("step-*/*"))
        if more:
            (shard.parent / "z.safetensors").write_bytes(b"")
        else:
            shard.unlink()
        with pytest.raises(RopeError, match=r"must hold the files that it lists, got missing, added or changed: "):
            shards.read(file)

    @pytest.mark.parametrize(
        "change",
        [
            {"version": "2"},
            {"identity": []},
            {"losses": []},
            {"losses": [1.0, 2.0]},
            {"losses": [1.0, 2.0, float("nan")]},
            {"losses": [1.0, 2.0, "3"]},
            {"losses": 3},
            {"seconds": float("inf")},
            {"folder": "../step-00000003"},
            {"sha256": {}},
            {"sha256": None},
            {"more": 1},
        ],
        ids=str,
    )
    def test_a_manifest(self, file: Path, change: dict[str, Any]) -> None:
        manifest = shards.folder_of(file) / "last.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
        with pytest.raises(
            RopeError, match=r"last\.json: (it must be a manifest of version 1|step-00000003 must hold)"
        ):
            shards.read(file)

    @pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000])
    def test_no_manifest(self, file: Path, text: str) -> None:
        (shards.folder_of(file) / "last.json").write_text(text)
        with pytest.raises(RopeError, match=r"last\.json: it must be a manifest of version 1, got "):
            shards.read(file)

    def test_another_training(self, file: Path) -> None:
        model, recipe = LanguageModel(Size(17, 12, 10, 2, 2)), Recipe(14, 1e-2)
        with pytest.raises(
            RopeError, match=r"\.shards must be a checkpoint of this training, got one that differs in "
        ):
            train(model, None, lambda step: pytest.fail("it trains"), recipe, file=file, about={})


class TestJoined:
    """Test `process_group` for torchrun's environment. TestCommand starts the processes themselves."""

    def test_alone(self) -> None:
        with ranks.process_group():
            assert (ranks.count(), ranks.rank(), ranks.device()) == (1, 0, torch.device("cpu"))
            assert ranks.on_first(lambda: 3) == 3
            assert ranks.gather_objects("x") == ["x"]

    def test_fewer_gpus_than_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        message = "each process must have its own GPU, got 4 processes on a machine with 2. Pass --nproc-per-node 2"
        with pytest.raises(RopeError, match=message), ranks.process_group():
            pass


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("command") / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*torchrun, str(HERE / "torchrun_worker.py"), "lab", "--quick", "--out", str(folder)]
    return folder, subprocess.run(
        arguments, capture_output=True, text=True, timeout=processes.PATIENCE, env=ENVIRONMENT
    )


class TestCommand:
    """Run `torchrun -m ropewalk lab --quick` with two processes."""

    def test_one_report(self, command: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        folder, process = command
        assert process.returncode == 0, process.stderr
        assert process.stdout.startswith("2 processes, 1 threads in each, 6 of 6 parts to do, saved in ")
        text = (folder / "report.txt").read_text()
        assert process.stdout.count(text) == 1
        assert process.stdout.count("The report, JSON and plots are in") == 1
        assert json.loads((folder / "report.json").read_text())["processes"] == 2

    def test_rows_are_those_of_one_process(
        self, command: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
    ) -> None:
        folder, _ = command
        rows = json.loads((folder / "report.json").read_text())["rows"]
        wanted = study.run(Study([tiny_lab.COPY], [0]), tmp_path, lambda line: None)["rows"]
        assert [row["method"] for row in rows] == [row["method"] for row in wanted]
        for row, one in zip(rows, wanted, strict=True):
            np.testing.assert_allclose(row["loss"], one["loss"], rtol=ROUNDING)

    def test_what_is_on_disk(self, command: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        """The files are those of one process, without shards, locks or timed steps."""
        folder, _ = command
        parts = {path.name for path in (folder / "parts").iterdir()}
        assert {Path(name).suffix for name in parts} == {".safetensors", ".json"}
        assert len(parts) == 12
        assert {path.suffix for path in folder.iterdir()} == {"", ".json", ".txt", ".png"}
        assert not list(folder.glob(".*"))
