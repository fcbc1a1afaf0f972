"""Test the text: which files it contains, which are held out, and its windows."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from ropewalk import RopeError
from ropewalk.tools.lab import text


def test_of_this_python() -> None:
    corpus = text.corpus()
    folder = Path(sysconfig.get_path("stdlib"))
    assert corpus.train.dtype == torch.uint8
    assert corpus.train.numpy().tobytes() == b"".join((folder / name).read_bytes() for name in corpus.train_files)
    assert [file.numpy().tobytes() for file in corpus.held_out] == [
        (folder / name).read_bytes() for name in corpus.held_out_files
    ]
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    assert "pydoc_data/topics.py" in corpus.train_files
    assert 5e6 < len(corpus.train) < 12e6
    held_out = sum(len(file) for file in corpus.held_out)
    assert 0.05 < held_out / (held_out + len(corpus.train)) < 0.2
    every = {*corpus.train_files, *corpus.held_out_files}
    assert not [name for name in every if "test" in name.split("/") or "site-packages" in name]
    assert text.corpus().digest == corpus.digest


NAMES = ("argparse.py", "ast.py", "json/encoder.py", "pydoc_data/topics.py", "calendar.py", "asyncio/tasks.py")


def library(folder: Path) -> Path:
    for i, name in enumerate(NAMES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + i]) * (10_000 + i))
    return folder


def test_which_files(tmp_path: Path) -> None:
    corpus = text.corpus(library(tmp_path))
    # Held out by the first byte of SHA-256 of the name, a multiple of ten: sha256("ast.py") begins with 0xb4 = 180.
    assert corpus.held_out_files == ("ast.py", "calendar.py", "json/encoder.py")
    assert corpus.train_files == ("argparse.py", "asyncio/tasks.py", "pydoc_data/topics.py")
    assert [chr(file[0]) for file in corpus.held_out] == ["B", "E", "C"]
    for name in (
        "test/test_ast.py",
        "asyncio/tests/test_tasks.py",
        "tkinter/ttk.py",
        "site-packages/numpy.py",
        "my.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 50_000)
    (tmp_path / "json" / "tool.py").write_bytes(b"x" * 8191)
    assert text.corpus(tmp_path).digest == corpus.digest
    (tmp_path / "ast.py").write_bytes(b"y" * 10_001)
    assert text.corpus(tmp_path).digest != corpus.digest


def test_without_sources(tmp_path: Path) -> None:
    (tmp_path / "ast.pyc").write_bytes(b"x" * 50_000)
    with pytest.raises(RopeError, match=r"text\.corpus: the folder must hold the sources .*, got 0 usable files in"):
        text.corpus(tmp_path)


def test_batches_come_from_seed_and_step_alone() -> None:
    data = torch.arange(250, dtype=torch.uint8)
    at = text.batches(data, batch=40, seq=7, seed=3)
    eleventh = at(11)
    assert torch.equal(at(11).tokens, eleventh.tokens)
    assert torch.equal(text.batches(data, batch=40, seq=7, seed=3)(11).tokens, eleventh.tokens)
    assert not torch.equal(at(12).tokens, eleventh.tokens)
    assert not torch.equal(text.batches(data, batch=40, seq=7, seed=4)(11).tokens, eleventh.tokens)
    assert eleventh.tokens.shape == eleventh.targets.shape == (40, 7)
    assert eleventh.tokens.dtype == torch.int64
    assert torch.equal(eleventh.targets, eleventh.tokens + 1)  # the text counts upwards
    assert torch.equal(eleventh.tokens - eleventh.tokens[:, :1], torch.arange(7).expand(40, 7))


def test_batches_reach_both_ends() -> None:
    at = text.batches(torch.arange(9, dtype=torch.uint8), batch=100, seq=7, seed=0)
    assert set(at(0).tokens[:, 0].tolist()) == {0, 1}
    assert set(text.batches(torch.arange(8), batch=100, seq=7, seed=0)(0).tokens[:, 0].tolist()) == {0}


def test_windows_stay_inside_files() -> None:
    files = tuple(torch.arange(n, dtype=torch.uint8) + 100 * i for i, n in enumerate((30, 5, 50)))
    found = text.windows(files, count=12, seq=9)
    assert found.tokens.shape == found.targets.shape == (12, 9)
    assert torch.equal(found.targets, found.tokens + 1)
    starts = found.tokens[:, 0].tolist()
    # 21 places in the first file and 41 in the third, whose bytes begin at 200; the second is too short.
    assert starts == [2, 7, 12, 18, *(200 + place for place in (2, 7, 12, 17, 22, 28, 33, 38))]
    assert text.windows((torch.arange(4), torch.arange(4)), count=2, seq=3).tokens.tolist() == [[0, 1, 2]] * 2
    with pytest.raises(RopeError, match=r"text\.windows: a held-out file must have more than seq=50 bytes, got none"):
        text.windows(files, count=1, seq=50)
