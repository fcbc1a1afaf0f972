"""Run examples/train_many_gpus.py with a tiny model on the CPU. The losses are the same for every mesh."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_many_gpus.py"
# What the page runs with four processes: the options of the mesh, and sizes that are small enough for a test.
COMMAND = f"torchrun --nproc-per-node 4 {SCRIPT.relative_to(ROOT).as_posix()} --tensor 2 "
PAGE = (ROOT / "docs" / "many-machines.md").read_text("utf-8").replace("\\\n", "")  # joins continued lines
(LINE,) = re.findall(f"^{COMMAND}(.*)$", PAGE, re.MULTILINE)
SIZE = LINE.split()


def ran(processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*launcher, str(SCRIPT), *SIZE, *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def losses(process: subprocess.CompletedProcess[str]) -> list[float]:
    assert process.returncode == 0, process.stdout + process.stderr
    steps = re.findall(r"^step (\d+): loss ([\d.]+)$", process.stdout, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [0, 1, 2, 3]
    return [float(loss) for _, loss in steps]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(ran(1))


@pytest.mark.parametrize(("processes", "options"), [(2, ("--context", "2")), (4, ("--tensor", "2"))])
def test_losses(alone: list[float], processes: int, options: tuple[str, ...], tmp_path: Path) -> None:
    assert losses(ran(processes, *options, "--save", str(tmp_path / "saved"))) == pytest.approx(alone, abs=5e-5)
    assert alone[-1] < alone[0] - 0.5
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == processes


@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 1, 1), (1, 4, 1)], ids=str)
def test_each_rank_holds_its_share_of_the_parameters(sizes: tuple[int, int, int]) -> None:
    """The ranks along `context` share the parameters as those along `data` do. Here, only one of the four exists."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    example = runpy.run_path(str(SCRIPT))
    model = example["LanguageModel"](layers=2, hidden=32, heads=4, kv_heads=2)
    whole = sum(parameter.numel() for parameter in model.parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        example["shard"](model, init_device_mesh("cpu", sizes, mesh_dim_names=("context", "data", "tensor")))
        assert sum(parameter.to_local().numel() for parameter in model.parameters()) == whole // 4
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (None, [], "start it with torchrun"),
        ("3", ["--tensor", "2"], "--tensor 2 times --context 1 must divide the 3 processes"),
        ("3", [], "--rows 16 must be a multiple of 3, the processes along `data`"),
        ("4", ["--context", "4", "--seq", "12"], "--seq 12 must be a multiple of 8, which is 2 times"),
        ("2", ["--tensor", "0"], "argument --tensor: must be at least 1, got 0"),
        ("1", ["--seq", "0"], "argument --seq: must be at least 1, got 0"),
        ("1", ["--hidden", "60", "--heads", "4"], "--hidden 60 must be a multiple of 8, which is 2 times --heads"),
        ("1", ["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        ("3", ["--tensor", "3"], "--heads 4 must be a multiple of --tensor 3"),
        ("1", ["--text", "missing.txt"], "--text must be a file, got missing.txt"),
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
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SIZE, *options])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert message in capsys.readouterr().err


def test_refuses_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SIZE])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "each process needs its own GPU, got 4 processes for 2 GPUs" in capsys.readouterr().err
