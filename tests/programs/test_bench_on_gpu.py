"""Test `ropewalk bench --device cuda` in a rehearsal on the CPU: it is complete, and times no wrong contender.

Its clock is tested with a made-up device, and with a GPU if there is one.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

import oracle
import ropewalk
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import clocks, measure, on_gpu, peers_gpu
from ropewalk.tools.bench.case import BASE, HEAD_DIM, LONGEST, Case
from ropewalk.tools.bench.clocks import OnCpu, OnGpu
from ropewalk.tools.bench.contenders import CONTENDERS_ON_GPU, Contender, eager

EAGER = [one for one in CONTENDERS_ON_GPU if not one.compiled]
KINDS: dict[str, dict[str, Any]] = {
    "forward": {"tokens": 5, "batch": 2},
    "backward": {"tokens": 5, "batch": 2, "passes": "backward"},
    "decode": {"tokens": 1, "batch": 3, "decode": True},
}


class Sets(OnCpu):
    """A clock with three sets of inputs, as on a GPU."""

    def sets(self, moved: int) -> int:
        return 3

    def prepare(self, calls: clocks.Calls) -> clocks.Timed:
        assert len({id(call) for call in calls}) == 3
        return super().prepare([lambda: [call() for call in calls]])


def rows(case: Case, *contenders: Contender) -> list[dict[str, Any]]:
    return measure.rows(case, contenders, Sets(), rounds=2, seconds=9.0)


def command(*options: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *options])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_contender_is_right(kind: str, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, **KINDS[kind])
    found = rows(case, *EAGER)
    assert [row["contender"] for row in found] == [c.name for c in EAGER if c.backward or kind != "backward"]
    assert {row["state"] for row in found} == {"timed"}, found


@pytest.mark.usefixtures("compiler")
def test_compiled_contenders_are_right() -> None:
    compiled = [one for one in CONTENDERS_ON_GPU if one.compiled]
    assert [one.name for one in compiled if one.does == "half"] == ["ropewalk, compiled", "Hugging Face, compiled"]
    found = rows(Case(5, torch.float32, batch=2, passes="backward"), *compiled)
    assert [row["state"] for row in found] == ["timed"] * 4, found


def ours(case: Case, pairing: Any = "half") -> Callable[..., Any]:
    rotation = ropewalk.Rope(HEAD_DIM, BASE, pairing).at(case.positions)
    return lambda q, k: rotation(q, k, layout="bshd")


def moved(case: Case) -> Callable[..., Any]:
    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = ours(case)(q, k)
        turned_k = turned_k.clone()
        turned_k.detach()[-1, -1, -1, 5] += 1e-4
        return turned_q, turned_k

    return turn


WRONG: dict[str, Callable[[Case], Any]] = {
    "other pairing": lambda case: ours(case, "interleaved"),
    "only q": lambda case: lambda q, k: (ours(case)(q, k)[0], k * 1),
    "one number of the last row": moved,
    "no way back": lambda case: (
        lambda q, k: [x + (y - x).detach() for x, y in zip((q, k), ours(case)(q, k), strict=True)]
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_contender_is_not_timed(kind: str, wrong: str) -> None:
    case = Case(dtype=torch.float32, **KINDS[kind])
    if wrong == "no way back" and kind != "backward":
        pytest.skip("it is right forward, but for rounding")
    bad, good = rows(case, Contender(wrong, "half", eager(WRONG[wrong])), Contender("ours", "half", eager(ours)))
    assert (bad["state"], good["state"]) == ("wrong", "timed"), bad
    assert "median" not in bad


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_pair_of_length_zero_has_to_stay_zero(pairing: Any) -> None:
    """In some versions of PyTorch, bfloat16 random numbers contain pairs (0, 0)."""
    case = Case(3, torch.bfloat16, batch=2)
    q, k = case.inputs()
    q[0, 1, 2] = 0
    turned = ours(case, pairing)(q, k)
    assert case.error(pairing, (q, k), turned) <= case.tolerance(pairing, own_angles=False)
    turned[0][0, 1, 2, 5] = 1e-6
    assert case.error(pairing, (q, k), turned) > case.tolerance(pairing, own_angles=False)


def test_decoding_is_checked_at_the_position_of_each_row() -> None:
    case = Case(1, torch.float32, batch=4, decode=True)
    assert case.positions.shape == (4, 1)
    assert len(set(case.positions.flatten().tolist())) == 4
    assert int(case.positions.max()) < LONGEST
    inv_freq = np.array([float(w) for w in oracle.inv_freq(BASE, HEAD_DIM)])
    angles = case.positions.numpy()[..., None, None] * inv_freq
    exact = [torch.from_numpy(oracle.rotate(x.double().numpy(), angles, "half")).float() for x in case.inputs()]
    assert case.error("half", case.inputs(), exact) < 2.0**-23
    assert case.error("half", case.inputs(), [x.roll(1, dims=0) for x in exact]) > 0.1


def test_a_peer_that_works_in_place_leaves_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Liger, the peer overwrites its arguments, and in the backward pass the gradients."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            assert cos.shape == sin.shape == (1, 5, HEAD_DIM)
            ctx.rotation = ropewalk.Rope(HEAD_DIM, BASE, "half").at(torch.arange(100, 105))
            ctx.rotation.apply_(q, k, layout="bhsd")
            return q, k

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            ctx.rotation.inverse().apply_(*grads, layout="bhsd")
            return *grads, None, None

    monkeypatch.setattr(peers_gpu, "import_module", lambda name: SimpleNamespace(LigerRopeFunction=InPlace))
    (liger,) = (one for one in peers_gpu.PEERS_ON_GPU if one.name == "Liger")
    for kind in ("forward", "backward"):
        after = Contender("after", "half", eager(ours))
        assert [row["state"] for row in rows(Case(dtype=torch.float32, **KINDS[kind]), liger, after)] == ["timed"] * 2


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Run a rehearsal. Return its output and file."""
    path = tmp_path_factory.mktemp("bench") / "gpu.json"
    ran = command("--device", "cuda", "--rehearse", "--no-compile", "--rounds", "2", "--json", str(path))
    assert ran.exit_code == 0, ran.output
    return ran.output, json.loads(path.read_text())


def test_rehearsal(rehearsed: tuple[str, dict[str, Any]]) -> None:
    said, report = rehearsed
    assert said.startswith("Rehearsal on the CPU: times are meaningless")
    assert report["gpu"] is None
    assert report["versions"]["ropewalk"] == ropewalk.__version__
    assert report["settings"]["rehearse"] is True
    names = {one.name for one in (*CONTENDERS_ON_GPU, *peers_gpu.PEERS_ON_GPU) if not one.compiled}
    assert {row["contender"] for row in report["rows"]} == names
    own = {one.name for one in EAGER}
    assert {row["state"] for row in report["rows"] if row["contender"] in own} == {"timed"}
    titles = list(dict.fromkeys(row["case"] for row in report["rows"]))
    assert {title.rpartition(", ")[2] for title in titles} == {"forward", "backward", "decoding"}
    assert all(f"\n{title}: " in said for title in titles)


def test_verdict(rehearsed: tuple[str, dict[str, Any]]) -> None:
    said, report = rehearsed
    end = said.splitlines()
    heading = "ropewalk: its time / time of copy_, then time of the fastest other contender / its time"
    end = end[end.index(heading) + 1 :]
    case = "2 x 64 tokens, float32, backward"
    times = {row["contender"]: row["median"] for row in report["rows"] if row["case"] == case and "median" in row}
    (line,) = (line for line in end if case in line and "interleaved" in line)
    assert line.split() == [
        *case.split(),
        "ropewalk,",
        "interleaved",
        f"{times['ropewalk, interleaved'] / times['copy_']:.2f}",
        f"{times['Meta'] / times['ropewalk, interleaved']:.2f}",
        "(Meta)",
    ]
    assert sum("in place" in line and line.endswith("no other contender") for line in end) == 8
    table, product = (line.rpartition(" ")[2] for line in end[-2:])
    assert float(table) <= 2.0**-24 < 1e-3 < float(product)


def test_a_single_contender() -> None:
    ran = command("--device", "cuda", "--rehearse", "--rounds", "1", "--only", "in place", "--no-backward")
    assert ran.exit_code == 0, ran.output
    assert "Hugging Face" not in ran.output
    assert "backward" not in ran.output
    assert ran.output.splitlines()[-1].split()[-2:] == ["other", "contender"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = command("--device", "cuda")
    assert ran.exit_code == 1
    must = "Error: bench: --device cuda needs a GPU that the kernels can use, got no GPU found. Run it on a machine"
    assert must in ran.output
    assert "--rehearse" in ran.output


@pytest.mark.parametrize(
    "options",
    [
        ("--device", "cuda", *option)
        for option in (
            ("--tokens", "5"),
            ("--dtype", "float32"),
            ("--threads", "1"),
            ("--rows", "1"),
            ("--held", "1"),
            ("--quick",),
            ("--plot", "a.png"),
        )
    ]
    + [("--device", "cpu", "--rehearse")],
    ids=lambda options: options[2],
)
def test_options_without_effect_are_refused(options: tuple[str, ...]) -> None:
    ran = command(*options)
    assert ran.exit_code == 1
    option, device = options[2], options[1]
    assert f"bench: {option} must be omitted with --device {device}, got {option}. It has no effect" in ran.output


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(
        ropewalk.RopeError,
        match=r"contender other than copy_, which is always measured, got 'nobody'\. The contenders are 'ropewalk', .*",
    ):
        bench.run_on_gpu(bench.GpuSettings(only=["nobody"], rehearse=True), print)
    with pytest.raises(FileNotFoundError, match=r"a\.json"):
        bench.run_on_gpu(bench.GpuSettings(rehearse=True), print, json_file=tmp_path / "none" / "a.json")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a made-up device with 8 ms between any two events. It records its calls."""
    asked: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            asked.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 8.0

    class Graph:
        def replay(self) -> None:
            asked.append("replay")

    fakes: dict[str, Any] = {
        "get_device_properties": lambda: SimpleNamespace(
            name="GPU", total_memory=10**9, L2_cache_size=1000, multi_processor_count=8
        ),
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": contextlib.nullcontext,
        "graph": contextlib.nullcontext,
        "_sleep": lambda cycles: asked.append("wait"),
        "synchronize": lambda: asked.append("synchronize"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return asked


def test_a_sample_on_a_gpu(made_up: list[str]) -> None:
    calls = [lambda i=i: made_up.append(f"call {i}") for i in range(4)]
    timed = OnGpu(replay=False).prepare(calls)
    assert timed.host is not None
    assert 0 < timed.host < 1
    made_up.clear()
    assert timed.sample() == 8e-3 / 4
    assert made_up == ["wait", "event", "call 0", "call 1", "call 2", "call 3", "event", "synchronize"]


def test_a_replay_on_a_gpu(made_up: list[str]) -> None:
    results: list[weakref.ref[Tensor]] = []

    def call() -> Tensor:
        result = torch.zeros(1)
        results.append(weakref.ref(result))
        return result

    timed = OnGpu(replay=True).prepare([call] * 4)
    number = len(results)
    made_up.clear()
    assert timed.sample() == 8e-3 / 4
    assert made_up == ["wait", "event", "replay", "event", "synchronize"]
    assert len(results) == number
    assert all(result() is not None for result in results[-4:])  # of the graph, which would be written over


def test_sets_do_not_fit_into_the_cache(made_up: list[str]) -> None:
    clock = OnGpu(replay=False)
    assert [clock.sets(moved) for moved in (1, 100, 1000, 10**6)] == [64, 31, 4, 4]


def test_a_run_on_the_made_up_gpu(made_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ropewalk, "backends", lambda: {"gpu kernel": "usable: Triton 3 on GPU"})
    decode = Case(1, torch.bfloat16, batch=2, decode=True)
    monkeypatch.setattr(on_gpu, "cases", lambda settings: [Case(4, torch.float32), decode])
    said: list[str] = []
    settings = bench.GpuSettings(only=["in place"], rounds=2)
    report = bench.run_on_gpu(settings, said.append)
    assert said[0].startswith("Triton 3 on GPU, torch ")
    assert (report["gpu"]["name"], report["gpu"]["second_level_cache"]) == ("GPU", 1000)
    timed = [row for row in report["rows"] if row["state"] == "timed"]
    assert len(timed) == 6
    assert all(0 < row["host"] < 1 and row["rounds"] == 2 for row in timed)
    assert {row["median"] for row in timed} == {8e-3 / 4}  # four sets, eager or in a graph
    assert sum(line.endswith("      host") for line in said) == 2
    assert made_up.count("replay") == 3 * (1 + 2)


def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and there is none")
    for kind in KINDS.values():
        case = Case(dtype=torch.bfloat16, device="cuda", **kind)
        found = measure.rows(case, EAGER, OnGpu(replay=case.decode), rounds=2, seconds=9.0)
        assert {row["state"] for row in found} == {"timed"}, found
        assert all(0 < row["median"] < 0.1 and 0 < row["host"] < 0.1 for row in found)
