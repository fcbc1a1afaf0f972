"""Test that files are written completely or not at all: full disks, read-only folders, kills; and their permissions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ropewalk import Rope, RopeError
from ropewalk.tools.cli import main
from ropewalk.tools.lab import checkpoint, parts
from ropewalk.tools.lab.model import LanguageModel, Size
from ropewalk.tools.lab.train import Batch, Recipe, train

resource = pytest.importorskip("resource")  # not on Windows

ROPE = Rope(8, 1e4, "half")
FORMS = {"hf": "folder", "llama2.c": "model.bin"}


def fresh() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Size(256, 16, 24, 2, 2, tied=True))


def batch(step: int) -> Batch:
    rows = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(step))
    return Batch(rows[:, :-1], rows[:, 1:])


def trained(file: Path, batch=batch) -> None:
    train(fresh(), ROPE, batch, Recipe(3, 1e-2, warmup=2), file=file, about={})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("source") / "text.safetensors"
    trained(file)
    return file


def exported(source: Path, target: Path, form: str, *more: str, length: int = 64):
    arguments = ["export", str(source), str(target), "--format", form, "--max-positions", str(length), *more]
    return CliRunner().invoke(main, arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def disk_with(size: int) -> Iterator[None]:
    """Limit the size of files. A write beyond the limit fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_line(ran, target: Path) -> None:
    assert ran.exit_code == 1
    files = (target, target.with_name("tokenizer.bin"))
    assert ran.stderr.startswith(tuple(f"Error: lab: {file} must be writable" for file in files))
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0, 1000, 20_000])
def test_an_export_on_a_full_disk(form: str, size: int, source: Path, tmp_path: Path) -> None:
    target = tmp_path / FORMS[form]
    with disk_with(size):
        one_line(exported(source, target, form), target)
    assert list(tmp_path.iterdir()) == []
    assert exported(source, target, form).exit_code == 0
    before = contents(tmp_path)
    with disk_with(size):
        one_line(exported(source, target, form, "--force", length=32), target)
    assert contents(tmp_path) == before


def test_a_training_on_a_full_disk(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling(step: int) -> Batch:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        return batch(step)

    try:
        with pytest.raises(RopeError, match=r"x\.safetensors must be writable, got "):
            trained(file, filling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    assert len(checkpoint.read(file).losses) == 2
    trained(file)
    assert contents(tmp_path)["x.safetensors"][-8:] == source.read_bytes()[-8:]
    assert checkpoint.read(file).losses == checkpoint.read(source).losses


def test_rows_on_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    parts.write_json(file, [1])
    with disk_with(100), pytest.raises(RopeError, match=r"rows\.json must be writable"):
        parts.write_json(file, list(range(1000)))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rows.json": "[\n 1\n]\n"}


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written(source: Path) -> None:
    for form, name in FORMS.items():
        target = Path("/sys/kernel") / name
        one_line(exported(source, target, form), target)
    with pytest.raises(RopeError, match="lab: /sys/kernel must be a folder where files can be written, got "):
        trained(Path("/sys/kernel/x.safetensors"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_every_new_file(umask: int, mode: int, source: Path, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        trained(tmp_path / "x.safetensors")
        for form, name in FORMS.items():
            assert exported(source, tmp_path / "out" / name, form).exit_code == 0
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert found == {
        "x.safetensors": mode, "out": mode | 0o111 & ~umask, "folder": mode | 0o111 & ~umask,
        "model.bin": mode, "tokenizer.bin": mode, "config.json": mode, "model.safetensors": mode,
        "tokenizer.json": mode, "tokenizer_config.json": mode,
    }  # fmt: skip


def test_an_export_killed_at_every_step(source: Path, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "export_worker.py"
    ran = subprocess.run(
        [sys.executable, str(worker), str(source), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "hf: killed " in ran.stdout
    assert "llama2.c: killed " in ran.stdout
