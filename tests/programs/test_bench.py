"""Test that `ropewalk bench` times only correct contenders and reports the others. Speed is not tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import oracle
import ropewalk
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import BASE, CONTENDERS, HEAD_DIM, Call, Case, Contender, OnCpu, OnGpu

EAGER = [one for one in CONTENDERS if "compiled" not in one.name]


def rows(*contenders: Contender, tokens: int = 5, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    return bench.rows(Case(tokens, dtype), contenders, OnCpu(), rounds=2, seconds=9.0)


def returns(make: Callable[..., Any]) -> Contender:
    """Return a contender whose result is that of `make` for the case, q and k."""
    return Contender("made up", "half", lambda case: lambda inputs: Call(lambda: make(case, *inputs)))


def turned(case: Case, q: Tensor, k: Tensor, pairing: Any = "half", late: int = 0) -> tuple[Tensor, Tensor]:
    return ropewalk.Rope(HEAD_DIM, BASE, pairing).at(case.positions - late)(q, k, layout="bshd")


def changed(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a rotation after which a tensor of k is changed in place."""

    def make(*given: Any) -> tuple[Tensor, Tensor]:
        q, k = turned(*given)
        k[0, -1, 3, 70] = change(k[0, -1, 3, 70])
        return q, k

    return make


WRONG: dict[str, Callable[..., Any]] = {
    "nothing turned": lambda case, q, k: (q, k),
    "other sign of k": lambda *given: (turned(*given)[0], -turned(*given)[1]),
    "one NaN": changed(lambda x: x * torch.nan),
    "one number off by 1e-5": changed(lambda x: x + 1e-5),
    "position one too low": lambda *given: turned(*given, late=1),
    "other pairing": lambda *given: turned(*given, pairing="interleaved"),
    "other dtype": lambda *given: [x.double() for x in turned(*given)],
    "a token short": lambda *given: [x[:, 1:] for x in turned(*given)],
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_wrong_contender_is_not_timed(make: Callable[..., Any]) -> None:
    for tokens in (5, 600):  # 600 are checked in two parts
        right, wrong = rows(returns(turned), returns(make), tokens=tokens)
        assert (right["state"], wrong["state"]) == ("timed", "wrong")
        assert "median" not in wrong
        json.dumps(wrong, allow_nan=False)


def test_the_formula_of_the_check_is_the_oracle() -> None:
    inputs = Case(3, torch.float32).inputs()
    angles = np.outer([100, 101, 102], [float(w) for w in oracle.inv_freq(BASE, HEAD_DIM)])
    exact = [torch.from_numpy(oracle.rotate(x.double().numpy(), angles[:, None], "half")) for x in inputs]
    assert Case(3, torch.float32).error("half", inputs, [x.float() for x in exact]) < 2.0**-23
    cos, sin = Case(3, torch.float32).tables
    np.testing.assert_allclose(torch.stack([cos, sin]), [np.cos(angles), np.sin(angles)], rtol=0, atol=2**-25)


def test_a_contender_that_fails_is_reported() -> None:
    def fails(case: Case) -> Any:
        raise ModuleNotFoundError("No module named 'nobody'\nand more")

    copy, failed = rows(CONTENDERS[0], Contender("made up", "half", fails))
    assert (copy["state"], copy["times_copy"]) == ("timed", 1.0)
    assert (failed["state"], failed["reason"]) == ("failed", "ModuleNotFoundError: No module named 'nobody'")


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = ["--tokens", "5", "--tokens", "9", "--no-compile", "--quick", "--json", str(file)]
    ran = CliRunner().invoke(cli.main, ["bench", *options])
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text())
    cells = [(dtype, tokens) for dtype in ("float32", "bfloat16") for tokens in (5, 9)]
    assert [(row["dtype"], row["tokens"], row["contender"]) for row in found["rows"]] == [
        (*cell, one.name) for cell in cells for one in EAGER
    ]
    for row in found["rows"]:
        assert (row["state"], row["rounds"]) == ("timed", 5), row
        assert 0 < row["p10"] <= row["median"] <= row["p90"]
        moved = 2 * row["tokens"] * (32 + 8) * 128 * (4 if row["dtype"] == "float32" else 2)
        assert row["gb_per_s"] == pytest.approx(moved / row["median"] / 1e9)
    copy, clone = found["rows"][:2]
    assert clone["times_copy"] == clone["median"] / copy["median"]
    assert found["versions"]["ropewalk"] == ropewalk.__version__
    assert "9 tokens, bfloat16\n" in ran.output
    assert CliRunner().invoke(cli.main, ["bench", "--json", str(tmp_path / "none" / "a.json")]).exit_code == 1


def test_quick_limits_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bench, "rows", lambda *_, **limits: asked.append(limits) or [])
    monkeypatch.setattr(bench, "table", lambda *_: "")
    for options in ([], ["--quick"]):
        assert CliRunner().invoke(cli.main, ["bench", "--tokens", "1", "--dtype", "float32", *options]).exit_code == 0
    assert asked == [{"rounds": 30, "seconds": 30.0}, {"rounds": 5, "seconds": 5.0}]


@pytest.mark.usefixtures("compiler")
def test_compiled_contenders_are_right() -> None:
    found = rows(*(one for one in CONTENDERS if "compiled" in one.name))
    assert [row["state"] for row in found] == ["timed"] * 2, found


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = CliRunner().invoke(cli.main, ["bench", "--device", "cuda"])
    assert ran.exit_code == 1
    assert "Error: bench: --device cuda needs a GPU that the kernels can use, got no GPU found. Run it" in ran.output


def test_a_sample_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up device with 8 ms between any two events."""
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 8.0

    fakes: dict[str, Any] = {
        "get_device_properties": lambda: SimpleNamespace(L2_cache_size=1000),
        "Event": Event,
        "_sleep": lambda cycles: asked.append("wait"),
        "synchronize": lambda: asked.append("synchronize"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert [OnGpu().sets(moved) for moved in (1, 100, 1000, 10**6)] == [64, 31, 4, 4]
    sample = OnGpu().prepare([lambda i=i: asked.append(f"call {i}") for i in range(4)])
    asked.clear()
    assert sample() == 8e-3 / 4
    assert asked == ["wait", "event", "call 0", "call 1", "call 2", "call 3", "event", "synchronize"]


def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and there is none")
    found = bench.rows(Case(1024, torch.bfloat16, "cuda"), EAGER, OnGpu(), rounds=2, seconds=9.0)
    assert {row["state"] for row in found} == {"timed"}, found
