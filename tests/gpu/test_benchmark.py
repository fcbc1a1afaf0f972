"""benchmarks/gpu.py, rehearsed on the CPU: that it is whole, and that it times nobody who is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300)


def test_rehearsal(tmp_path: Path) -> None:
    chosen = ("copy, device to device", "ropewalk", "ropewalk, in place", "Hugging Face", "Meta", "Liger", "FlashInfer")
    ran = run("--rehearse", "--json", str(tmp_path / "r.json"), *[o for name in chosen for o in ("--only", name)])
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["angles"]["ropewalk"] <= 1e-7 < report["angles"]["the usual float32 product"]
    timed: set[str] = set()
    for case in report["cases"]:
        for row in case["rows"]:
            assert ("ms" in row) is ("not timed" not in row)
            assert row.get("not timed", "ModuleNotFoundError").startswith(
                ("ModuleNotFoundError", "NotImplementedError")
            )
            timed |= {row["name"]} if "ms" in row else set()
    assert timed >= {"copy, device to device", "ropewalk", "ropewalk, in place", "Hugging Face", "Meta"}
    assert "ropewalk: its part of the bandwidth of the copy" in ran.stdout
    assert {case["title"].split(",")[0] for case in report["cases"]} == {"forward", "backward", "decode"}


def test_of_two_alone(tmp_path: Path) -> None:
    ran = run("--rehearse", "--only", "ropewalk, in place", "--only", "copy, device to device")
    assert ran.returncode == 0, ran.stderr
    assert "in place" in ran.stdout.splitlines()[-4]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = run()
    assert ran.returncode == 2
    assert "PyTorch sees no GPU here; --rehearse runs without one" in ran.stderr


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_pair_of_length_zero_has_to_stay_zero(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, pairing: str
) -> None:
    """The random numbers of some versions of PyTorch have pairs (0, 0) in bfloat16."""
    case = script.Case("case", 2, 3, torch.bfloat16, pairing, "cpu")
    q, k = case.queries(0)
    q[0, 1, 2] = 0
    monkeypatch.setattr(case, "queries", lambda seed: (q, k))
    (ours,) = (c for c in script.CONTENDERS if c.name == "ropewalk")
    run = ours.make(case)
    script.check(case, ours, run)

    def moved(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned, other = run(q, k)
        turned[0, 1, 2, 5] = 1e-6
        return turned, other

    with pytest.raises(ArithmeticError, match="of the length of a pair"):
        script.check(case, ours, moved)


@pytest.mark.parametrize("how", [{}, {"backward": True}, {"decode": True}], ids=str)
def test_who_is_wrong_is_not_timed(script: ModuleType, how: dict[str, Any]) -> None:
    case = script.Case("case", 2, 1 if "decode" in how else 70, torch.float32, "half", "cpu", **how)

    def other_pairing(case: Any) -> Any:
        return script.ours(script.Case("case", 2, case.seq, torch.float32, "interleaved", "cpu", **how))

    def only_q(case: Any) -> Any:
        return lambda q, k: (case.rotation(q, layout="bshd"), k)

    for name, make in (("other pairing", other_pairing), ("only q", only_q)):
        script.CONTENDERS = [script.Contender(name, make), script.Contender("ropewalk", script.ours)]
        wrong, right = script.measure(case, script.Clock("cpu"), 2, [])
        assert wrong["not timed"].startswith("ArithmeticError: wrong: off by")
        assert right["ms"] > 0
