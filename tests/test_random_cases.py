"""Test tools/random_cases.py: each kind of case runs, and a wrong case is reported with its seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import random_cases


def test_each_kind_of_case(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert random_cases.main(["--seed", "134", "--cases", "40"]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert out.startswith("seed 134\n")
    assert out.endswith("40 of 40 cases are right\n")
    assert {line.split()[1] for line in out.splitlines()[1:-1]} == {kind.__name__ for kind in random_cases.KINDS}


def test_a_wrong_case_is_repeated_by_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = random_cases.oracle.rotate_by_tables
    monkeypatch.setattr(
        random_cases.oracle, "rotate_by_tables", lambda *given: (right(*given)[0] + 1e-3, right(*given)[1])
    )
    assert random_cases.main(["--seed", "1", "--cases", "9"]) == 1
    (first, *_) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG: "))
    assert random_cases.main(first.removeprefix("WRONG: ").partition(":")[0].split()) == 1
    assert first in capsys.readouterr().out.splitlines()
