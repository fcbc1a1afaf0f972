"""Test the study in examples/lab: its numbers, that it continues after a kill, and that the quick one runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import oracle
import ropewalk
from each import each

HERE = Path(__file__).parent
LAB = Path(__file__).parents[1] / "examples" / "lab"
NAMES = ("model", "training", "methods", "text", "tasks", "findings", "report", "study")
GOLDEN = json.loads((Path(__file__).parent / "golden" / "lab.json").read_text(encoding="utf-8"))


def tiny(modules: SimpleNamespace) -> list[Any]:
    """Return both tasks with the sizes of the golden values, which train and measure in a second."""
    recipe, size = modules.training.Recipe, modules.model.Size
    common = {
        "recipe": recipe(steps=4, learning_rate=1e-3, warmup=2), "sequences": 2, "test_sequences": 3,
        "tune_recipe": recipe(steps=2, learning_rate=1e-3, warmup=1), "tune_sequences": 2,
    }  # fmt: skip
    small, tied = size(65, 16, 16, 1, 2), size(256, 16, 16, 1, 2, tied=True)
    copy = dataclasses.replace(
        modules.tasks.COPY, size=small, trained=16, lengths=(3, 7, 15, 31, 63), shortest=2, **common
    )
    lengths = (16, 32, 64, 128, 256)
    return [copy, dataclasses.replace(modules.tasks.TEXT, size=tied, trained=32, lengths=lengths, **common)]


def load() -> SimpleNamespace:
    """Import the modules as `python examples/lab` does, with a corpus that is the same in every Python."""
    sys.path.insert(0, str(LAB))
    modules = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})

    def letters(seed: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(seed).integers(97, 105, count).astype(np.uint8))

    corpus = modules.text.Corpus(letters(0, 4000), (letters(1, 900), letters(2, 700)), "made")
    modules.own_corpus, modules.tasks._corpus = modules.tasks._corpus, lambda: corpus
    return modules


@pytest.fixture(scope="module")
def lab() -> Iterator[SimpleNamespace]:
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    try:
        yield load()
    finally:
        sys.path.remove(str(LAB))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def rows_of(lab: SimpleNamespace, folder: Path) -> Any:
    return lab.study.run(tiny(lab)[:1], [3], folder)["rows"]


def test_numbers_of_both_tasks(lab: SimpleNamespace, tmp_path: Path) -> None:
    rows = lab.study.run(tiny(lab), [3], tmp_path, baselines=True)["rows"]
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    # A loss is a mean of float32 numbers of about 5, whose sums may be in another order on another machine.
    losses = {file.stem: pytest.approx(load_file(file)["losses"].tolist(), rel=1e-5) for file in files}
    assert losses == GOLDEN["losses"]
    assert len(rows) == len(GOLDEN["rows"]) == 36
    for row, wanted in zip(rows, GOLDEN["rows"], strict=True):
        close = {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, list) else value for key, value in row.items()
        }
        assert close == wanted


KILLED = """
import os, signal, sys
sys.path[:0] = TESTS
from pathlib import Path
import test_lab
lab = test_lab.load()
count = 0
replace = os.replace
def killing(*files):
    global count
    count += 1
    if count == STOP:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*files)
os.replace = killing
test_lab.rows_of(lab, Path(FOLDER))
"""


def test_a_killed_study_continues(lab: SimpleNamespace, tmp_path: Path) -> None:
    """Killed between the write of a file and its move: in the third step of a training, and in a measurement."""
    wanted = rows_of(lab, tmp_path / "whole")
    for stop in (4, 9):
        script = KILLED.replace("STOP", str(stop)).replace("FOLDER", repr(str(tmp_path / "killed")))
        script = script.replace("TESTS", repr([str(HERE), str(HERE / "support")]))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert done.returncode == -9, done.stderr
    assert len(list((tmp_path / "killed" / "parts").glob("*.safetensors"))) < 6
    assert rows_of(lab, tmp_path / "killed") == wanted
    for file in (tmp_path / "whole" / "parts").glob("*.safetensors"):
        continued = load_file(tmp_path / "killed" / "parts" / file.name)
        assert all(torch.equal(value, continued[name]) for name, value in load_file(file).items())


def test_a_folder_of_another_training(lab: SimpleNamespace, tmp_path: Path) -> None:
    """It is refused, and other lengths are measured without training."""
    rows_of(lab, tmp_path)
    (copy, _) = tiny(lab)
    shorter = dataclasses.replace(copy, lengths=(3, 7))
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").glob("*.safetensors")}
    rows = lab.study.run([shorter], [3], tmp_path)["rows"]
    assert {len(row["loss"]) for row in rows} == {2}
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").glob("*.safetensors")}
    other = dataclasses.replace(copy, recipe=dataclasses.replace(copy.recipe, learning_rate=1.0))
    with pytest.raises(SystemExit, match=r"copy-3-trained\.json is of another training"):
        lab.study.run([other], [3], tmp_path)


def test_the_quick_study_runs(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab.tasks, "COPY", tiny(lab)[0])
    monkeypatch.setattr(sys, "argv", ["lab", "--quick", "--seed", "3", "--out", str(tmp_path)])
    runpy.run_path(str(LAB / "__main__.py"), run_name="__main__")
    said, text = capsys.readouterr().out, (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "[6/6] copy-3-tuned-larger-base" in said
    assert text.rstrip("\n") in said
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == 15
    assert {path.name for path in tmp_path.glob("*.png")} == {"copy-accuracy.png", "copy-loss.png"}


def test_frequencies_of_the_methods(lab: SimpleNamespace) -> None:
    """By the papers' formulas, in mpmath. Dynamic methods do not change the trained range."""
    base, dim, trained = 10_000.0, 32, 256
    rope = ropewalk.Rope(head_dim=dim, base=base, pairing="half")
    formulas = {
        "none": lambda factor: oracle.inv_freq(base, dim),
        "PI": lambda factor: oracle.linear(base, dim, factor),
        "NTK": lambda factor: oracle.ntk(base, dim, factor),
        "by parts": lambda factor: oracle.yarn(base, dim, factor, trained),
        "Llama 3": lambda factor: oracle.by_parts(base, dim, factor, 1, 4, trained),
        "YaRN": lambda factor: oracle.yarn(base, dim, factor, trained),
        "larger base": lambda factor: oracle.inv_freq(50 * base, dim),
    }
    methods = {method.name: method for method in (*lab.methods.METHODS, *lab.methods.TUNES)}
    assert set(methods) == {*formulas, "PI dynamic", "NTK dynamic", "YaRN dynamic", "Self-Extend"}

    def check(row: tuple[str, int]) -> None:
        name, n = row
        plan, kind = methods[name].plan(rope, trained, n), name.removesuffix(" dynamic")
        if (name != kind or name == "Self-Extend") and n <= trained:
            assert plan == rope
        elif name == "Self-Extend":

            def farthest(group: int) -> int:
                """The largest distance by the paper. Beyond the window: floor(m/G) − floor(n/G) + w − floor(w/G)."""
                pairs = [(m, k) for m in range(n) for k in (0, max(0, m - 64), max(0, m - 65))]
                return max(m - k if m - k < 64 else m // group - k // group + 64 - 64 // group for m, k in pairs)

            assert (plan.rope, plan.window) == (rope, 64)
            assert farthest(plan.group) < trained <= farthest(plan.group - 1)
        else:
            factor = 4.0 if name == kind else n / trained
            # A few roundings of float64 on the way to each frequency.
            np.testing.assert_allclose(plan.inv_freq, [float(w) for w in formulas[kind](factor)], rtol=1e-14)
            wanted = 0.1 * math.log(factor) + 1 if kind == "YaRN" else 1.0
            assert plan.attention_factor == pytest.approx(wanted, rel=1e-15)

    each(((f"{name} {n}", (name, n)) for name in methods for n in (1, 256, 257, 1024, 2048)), check)


def test_a_copy_by_hand(lab: SimpleNamespace) -> None:
    made = lab.tasks.copy_batch(torch.tensor([[5, 63, 0]]))
    assert made.tokens.tolist() == [[64, 5, 63, 0, 64, 5, 63]]
    assert made.targets.tolist() == [[5, 63, 0, 64, 5, 63, 0]]
    assert made.mask.tolist() == [[False, False, False, False, True, True, True]]


def test_the_text_of_this_python(lab: SimpleNamespace) -> None:
    corpus = lab.own_corpus()
    assert 5e6 < len(corpus.train) < 12e6
    held_out = sum(len(file) for file in corpus.held_out)
    assert 0.05 < held_out / (held_out + len(corpus.train)) < 0.2
    whole = corpus.train.numpy().tobytes()
    assert not any(file.numpy().tobytes() in whole for file in corpus.held_out)
    files = tuple(torch.arange(n, dtype=torch.uint8) + 100 * i for i, n in enumerate((30, 5, 50)))
    found = lab.text.windows(files, count=12, seq=9)
    assert torch.equal(found.targets, found.tokens + 1)
    # 21 places in the first file and 41 in the third, whose bytes begin at 200; the second is too short.
    assert found.tokens[:, 0].tolist() == [2, 7, 12, 18, *(200 + place for place in (2, 7, 12, 17, 22, 28, 33, 38))]
