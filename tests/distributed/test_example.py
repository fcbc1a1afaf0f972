"""Run examples/train_many_gpus.py with a tiny model on the CPU. The losses are the same for every mesh."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_many_gpus.py"
# What the page runs with four processes: the options of the mesh, and sizes that are small enough for a test.
COMMAND = f"torchrun --nproc-per-node 4 {SCRIPT.relative_to(ROOT).as_posix()} --tensor 2 "
PAGE = (ROOT / "docs" / "many-machines.md").read_text("utf-8").replace("\\\n", "")  # joins continued lines
(LINE,) = re.findall(f"^{COMMAND}(.*)$", PAGE, re.MULTILINE)
SIZE = LINE.split()
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

FILES = "--text must be a file, and --checkpoint a folder in which files can be written"

Steps = dict[int, tuple[float, float]]
"""The loss and the norm of the gradient of each step. AdamW hides a wrong factor of the gradient; the norm shows it."""


def steps(output: str) -> Steps:
    found = re.findall(r"^step (\d+): loss ([\d.]+), norm ([\d.]+)$", output, re.MULTILINE)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}


def same(steps: Steps) -> Steps:
    """What compares equal to these steps up to rounding, which four steps of AdamW amplify."""
    return {
        step: (pytest.approx(loss, abs=5e-5), pytest.approx(norm, rel=1e-3)) for step, (loss, norm) in steps.items()
    }


@pytest.fixture(scope="module")
def ran() -> Iterator[Callable[..., Steps]]:
    """Return a function that runs the example with some number of processes."""
    worker = Path(__file__).parent / "example_runs.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(worker)], **pipes, text=True, env=ENVIRONMENT) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None

        def run(processes: int, *options: str, killed_after: Path | None = None) -> Steps:
            asked = [processes, [*SIZE, *options], None if killed_after is None else str(killed_after)]
            runner.stdin.write(json.dumps(asked) + "\n")
            runner.stdin.flush()
            statuses, output = json.loads(runner.stdout.readline())
            assert statuses == [0 if killed_after is None else -9] * processes, output
            return steps(output)

        yield run


@pytest.fixture(scope="module")
def alone(ran: Callable[..., Steps]) -> Steps:
    return ran(1)


def test_command_of_the_page(alone: Steps) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, str(SCRIPT), "--tensor", "2", *SIZE]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    assert steps(process.stdout) == same(alone)
    assert list(alone) == [1, 2, 3, 4]
    assert alone[4][0] < alone[1][0] - 0.5


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (1, "--accumulate 4"),
        (2, "--accumulate 2 --recompute"),  # FSDP2
        (2, "--context 2"),
        (2, "--tensor 2 --compile"),
        (8, "--tensor 2 --context 2 --accumulate 2 --recompute"),
    ],
)
def test_steps_are_those_of_one_process(ran: Callable[..., Steps], alone: Steps, processes: int, options: str) -> None:
    assert ran(processes, *options.split()) == same(alone)


def test_resumes_with_other_processes(
    ran: Callable[..., Steps],
    alone: Steps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All processes are killed after a checkpoint. Another mesh then takes the same steps as without interruption.

    Other options of the model or of the learning rates are refused. These heads have weights of the same shapes.
    """
    saved = ("--checkpoint", str(tmp_path), "--save-every", "1")
    ran(4, "--tensor", "2", "--recompute", *saved, killed_after=tmp_path / "step-1" / ".metadata")
    resumed = ran(2, "--context", "2", *saved)
    assert 4 in resumed
    assert resumed == same({step: alone[step] for step in range(min(resumed), 5)})
    assert ran(1, *saved) == {}  # nothing is left to do
    changed = {
        "--steps": ("12", "4"),
        "--learning-rate": ("0.02", "0.01"),
        "--heads": ("2", "4"),
        "--layers": ("3", "2"),
    }
    for option, (value, was) in changed.items():
        more = ["--kv-heads", "2"] if option == "--heads" else []
        line = refusal(monkeypatch, capsys, {"WORLD_SIZE": "1"}, *saved, option, value, *more)
        want = (
            f"{option} must be {was}, as in {tmp_path / 'step-4'}, got {value}; --checkpoint NEW_FOLDER starts again\n"
        )
        assert line == f"train_many_gpus.py: error: {want}"


@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)], ids=str)
def test_each_rank_holds_its_share_of_the_parameters(sizes: tuple[int, int, int]) -> None:
    """The ranks along `context` share the parameters as those along `data` do. Here, only one of the four exists."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    example = runpy.run_path(str(SCRIPT))
    with torch.device("meta"):
        model = example["LanguageModel"](layers=2, hidden=32, heads=4, kv_heads=2)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        data, context, tensor = sizes
        meshes = example["build_mesh"]("cpu", tensor, context)
        example["parallelize"](model, *meshes, torch.bfloat16, recompute=False, compiled=False)
        for name, parameter in model.named_parameters():
            assert parameter.device.type == "meta"
            share = data * context * (1 if "norm" in name else tensor)  # the norms are the same for all heads
            assert parameter.to_local().numel() == whole[name] // share, name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (None, [], "start it with torchrun"),
        ("1", ["--rows", "0"], "argument --rows: must be at least 1, got 0"),
        ("3", ["--tensor", "2"], "--tensor 2 times --context 1 must divide the 3 processes"),
        ("3", [], "--rows 8 must be a multiple of 3, the processes along `data`"),
        ("2", ["--accumulate", "3"], "--rows 8 must be a multiple of 6, the processes along `data` times --accumulate"),
        ("4", ["--context", "4", "--seq", "12"], "--seq 12 must be a multiple of 8, which is 2 times"),
        ("2", ["--tensor", "0"], "argument --tensor: must be at least 1, got 0"),
        ("1", ["--seq", "0"], "argument --seq: must be at least 1, got 0"),
        ("1", ["--hidden", "60", "--heads", "4"], "--hidden 60 must be a multiple of 32, which is 8 times --heads"),
        ("1", ["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        ("3", ["--tensor", "3"], "--heads 4 must be a multiple of --tensor 3"),
        (
            "6",
            ["--heads", "12", "--kv-heads", "4", "--hidden", "96", "--tensor", "6"],
            "--tensor 6 must divide --kv-heads",
        ),
        ("1", ["--learning-rate", "nan"], "--learning-rate must be positive and finite, got nan"),
        ("1", ["--checkpoint", "short.txt"], f"{FILES}, got [Errno 17] File exists: 'short.txt'"),
        ("1", ["--checkpoint", "/proc"], f"{FILES}, got [Errno 2] No such file or directory: '/proc/"),
        ("1", ["--text", "missing.txt"], f"{FILES}, got [Errno 2] No such file or directory: 'missing.txt'"),
        ("1", ["--text", "."], f"{FILES}, got [Errno 21] Is a directory: '.'"),
        ("1", ["--text", "short.txt"], "--text must have more bytes than --seq 32, got 9 in short.txt"),
    ],
)
def test_refuses_options(
    ranks: str | None,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short", encoding="utf-8")
    line = refusal(monkeypatch, capsys, {} if ranks is None else {"WORLD_SIZE": ranks}, *options)
    assert line.startswith(f"train_many_gpus.py: error: {message}")
    assert line.count("\n") == 1


def test_refuses_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    line = refusal(monkeypatch, capsys, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert "each process needs its own GPU, got 4 processes for 2 GPUs" in line


@pytest.mark.parametrize("option", ["--rows", "--hidden"])  # of the parser, and of find_problem
def test_only_one_rank_says_what_is_wrong(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    value = {"--rows": "0", "--hidden": "9"}[option]
    assert refusal(monkeypatch, capsys, {"WORLD_SIZE": "2", "RANK": "1"}, option, value) == ""
    assert slept == [10]  # while rank 0 says it: torchrun ends all ranks as soon as one of them ends


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str], *options: str
) -> str:
    """Run the script with these variables of torchrun. Return what it writes before it ends with status 2."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SIZE, *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    return capsys.readouterr().err
