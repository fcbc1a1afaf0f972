"""Test tools/matrix.py: the choice of rows, and the commands that it runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "matrix.py"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_rows_are_chosen_by_words(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--list", "3.12", "lowest"]) == 0
    assert capsys.readouterr().out == "python 3.11, torch 2.13, lowest\npython 3.12, torch newest\n"


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--every", "-1"], "--every must be at least 0, got -1"), (["2.7"], "no row has 2.7")]
)
def test_bad_arguments(matrix: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(arguments)
    assert said in capsys.readouterr().err


def test_lowest_is_what_the_project_declares(matrix: ModuleType, tmp_path: Path) -> None:
    project = {
        "dependencies": ["click>=8.1", "torch>=2.9"],
        "optional-dependencies": {
            "plots": ["matplotlib>=3.8"],
            "explore": ["plotly>=6.0"],
            "hub": ["huggingface_hub>=0.23"],
            "lab": ["ropewalk[plots]"],
            "test": ["pytest-xdist>=3.6.1", "triton>=3.5; sys_platform == 'linux'"],
        },
    }
    assert matrix.lowest(project) == [
        "click==8.1.*",
        "matplotlib==3.8.*",
        "plotly==6.0.*",
        "huggingface_hub==0.23.*",
        "pytest-xdist==3.6.1.*",
    ]
    install = matrix.commands(matrix.Row("3.11", "2.13", lowest=True), "python", tmp_path)[3]
    assert {"torch==2.13.*", "numpy==1.26.*", "pytest==8.2.*", "matplotlib==3.8.*"} <= set(install)


@pytest.mark.parametrize(("every", "sample"), [("10", [0, 10, 20]), ("0", [])])
def test_the_sample_holds_whole_what_depends_on_versions(
    matrix: ModuleType, every: str, sample: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWALK_EVERY", every)
    root = SCRIPT.parents[1]
    files = ["tests/test_rope.py"] * 25 + [matrix.ALWAYS_ALL[0]] * 3
    items = [SimpleNamespace(path=root / file, nodeid=f"{file}::test", number=i) for i, file in enumerate(files)]
    compiled = "tests/test_axes.py"
    items.append(SimpleNamespace(path=root / compiled, nodeid=f"{compiled}::TestCompiled::test_exact", number=28))
    matrix.pytest_collection_modifyitems(items)
    assert [item.number for item in items] == [*sample, 25, 26, 27, 28]
    for path in (*matrix.ALWAYS_ALL, *matrix.EXCLUDED):
        assert (root / path).exists(), path


def test_a_row_without_its_python_is_not_run(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(matrix, "interpreter", lambda version: None)
    assert matrix.main(["3.14", "--folder", str(tmp_path)]) == 0
    assert "skipped: no Python 3.14 was found" in capsys.readouterr().out


def test_a_failing_row_sets_the_exit_status(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(matrix, "interpreter", lambda version: sys.executable)
    for step, (program, passed, said) in enumerate(
        (
            ("print('5 passed in 3s')", True, "5 passed in 3s"),
            ("print('1 failed'); raise SystemExit(1)", False, "1 failed; see "),
        )
    ):
        pytest_step = [sys.executable, "-c", program, "pytest"]
        monkeypatch.setattr(matrix, "commands", lambda row, python, environment, step=pytest_step: [step])
        assert matrix.main(["3.14", "--folder", str(tmp_path / str(step))]) == int(not passed)
        printed = capsys.readouterr().out
        assert said in printed
        assert ("FAILED" in printed) is not passed
    monkeypatch.setattr(matrix, "commands", lambda *_: [[sys.executable, "-c", "raise SystemExit(1)"]])
    assert matrix.main(["3.14", "--folder", str(tmp_path)]) == 1
    assert "failed: see" in capsys.readouterr().out
