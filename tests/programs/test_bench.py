"""Test that the benchmark times only correct contenders, reports the others, and writes its results.

Speed is not tested.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import oracle
import ropewalk
from ropewalk import plots
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import machine, measure
from ropewalk.tools.bench.case import BASE, HEAD_DIM, Case
from ropewalk.tools.bench.clocks import OnCpu, Timed
from ropewalk.tools.bench.contenders import CONTENDERS, Call, Contender
from ropewalk.tools.bench.peers import PEERS

BY_NAME = {one.name: one for one in (*CONTENDERS, *PEERS)}
EAGER = [one for one in CONTENDERS if "compiled" not in one.name]
MODULES = ("rotary_embedding_torch", "onnxruntime", "mlx.core", "jax", "vllm._C")


def rows(*contenders, tokens=5, dtype=torch.float32, layout="bshd", backward=False):
    case = Case(tokens, dtype, layout, "forward + backward" if backward else "forward")
    return measure.rows(case, contenders, OnCpu(), rounds=2, seconds=9.0)


def returns(make, **how):
    """Return a contender whose result is that of `make` for the case, q, k and the gradients."""
    return Contender("made up", "half", lambda case: lambda inputs: Call(lambda: make(case, *inputs)), **how)


def turned(case, q, k, *grads, pairing="half", late=0):
    rope = ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing)
    return rope.at(case.positions - late)(q, k, layout=case.layout)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_contender_is_right(dtype, layout, backward):
    found = rows(*EAGER, dtype=dtype, layout=layout, backward=backward)
    assert [row["contender"] for row in found] == [c.name for c in EAGER if c.backward or not backward]
    for row in found:
        assert (row["state"], row["rounds"]) == ("timed", 2), row
        assert 0 < row["p10"] <= row["median"] <= row["p90"]
        assert row["dtype"] == str(dtype).removeprefix("torch.")


def other_sign(*given):
    q, k = turned(*given)
    return q, -k


def one_bad_number(value):
    def make(*given):
        q, k = turned(*given)
        k[0, -1, 3, 70] = value(k[0, -1, 3, 70])
        return q, k

    return make


WRONG = {
    "nothing turned": lambda case, q, k: (q, k),
    "other sign of k": other_sign,
    "one NaN": one_bad_number(lambda x: torch.nan),
    "one number off by 1e-5": one_bad_number(lambda x: x + 1e-5),
    "position one too low": lambda *given: turned(*given, late=1),
    "other pairing": lambda *given: turned(*given, pairing="interleaved"),
    "other dtype": lambda *given: [x.double() for x in turned(*given)],
    "a token short": lambda *given: [x[:, 1:] for x in turned(*given)],
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_wrong_contender_is_not_timed(make):
    right, wrong = rows(returns(turned), returns(make))
    assert right["state"] == "timed"
    assert wrong["state"] == "wrong"
    assert "median" not in wrong
    json.dumps(wrong, allow_nan=False)


def test_wrong_gradient_is_not_timed():
    def no_way_back(case, *given):
        return *turned(case, *given), *given[2:]

    assert [row["state"] for row in rows(returns(no_way_back), backward=True)] == ["wrong"]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_the_formula_of_the_check_is_the_oracle(pairing):
    case = Case(3, torch.float32)
    inputs = case.inputs()
    angles = np.outer([100, 101, 102], [float(w) for w in oracle.inv_freq(BASE, HEAD_DIM)])
    exact = [torch.from_numpy(oracle.rotate(x.double().numpy(), angles[:, None], pairing)) for x in inputs]
    assert case.error(pairing, inputs, [x.float() for x in exact]) < 2.0**-23
    assert case.error("tables", inputs, [torch.from_numpy(f(angles)) for f in (np.cos, np.sin)]) < 1e-13


def test_only_contenders_with_own_angles_may_have_float32_angles():
    case = Case(4096, torch.float32)
    assert case.tolerance("half", own_angles=False) == 2.0**-21
    assert case.tolerance("half", own_angles=True) == 2.0**-21 + 4196 * 2.0**-22
    assert Case(1, torch.bfloat16).tolerance("half", own_angles=False) == 2.0**-5


def test_bytes_are_those_of_q_and_k():
    forward, both, back = (Case(1, torch.float32, passes=p) for p in ("forward", "forward + backward", "backward"))
    assert forward.bytes_moved == back.bytes_moved == 2 * 4 * (32 + 8) * 128
    assert both.bytes_moved == 2 * forward.bytes_moved
    assert Case(1, torch.float32, batch=3).bytes_moved == 3 * forward.bytes_moved


def test_ratios_are_to_the_copy():
    copy, other = rows(BY_NAME["copy_"], BY_NAME["clone"])
    assert copy["times_copy"] == 1.0
    assert other["times_copy"] == other["median"] / copy["median"]
    assert rows(BY_NAME["clone"])[0]["times_copy"] is None
    assert other["gb_per_s"] == 2 * 5 * 4 * 40 * 128 / other["median"] / 1e9


def test_missing_peers_are_reported(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    said = []
    report = bench.run(bench.Settings(tokens=[2], rounds=1, compiled=False, backward=False, stream=0), said.append)
    states = {row["contender"]: row["state"] for row in report["rows"]}
    assert {states[peer.name] for peer in PEERS} == {"not installed"}
    assert sum("not installed: no module" in line for line in said) == 2 * len(PEERS)


def test_a_failing_contender_is_reported():
    def fail(*given):
        raise RuntimeError("no such kernel\nand more")

    (row,) = rows(returns(fail))
    assert (row["state"], row["reason"]) == ("failed", "RuntimeError: no such kernel")


def test_a_contender_that_fails_late_is_reported():
    """A GPU may run out of memory when all contenders are prepared."""

    class Late(OnCpu):
        def prepare(self, calls):
            timed = super().prepare(calls)
            taken = iter([timed.sample()])
            return timed if calls[0]() is not None else Timed(lambda: next(taken, None) or 1 / 0)

    contenders = (returns(lambda case, q, k: turned(case, q, k)), BY_NAME["ropewalk, in place"], BY_NAME["copy_"])
    right, late, copy = measure.rows(Case(5, torch.float32), contenders, Late(), rounds=3, seconds=9.0)
    assert (right["state"], right["rounds"], copy["times_copy"]) == ("timed", 3, 1.0)
    assert (late["state"], late["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "median" not in late


@pytest.mark.parametrize(("module", "peer"), list(zip(MODULES, PEERS, strict=True)))
def test_installed_peers_are_right(module, peer):
    pytest.importorskip(module)
    for layout in ("bshd", "bhsd")[: 1 if module == "vllm._C" else 2]:
        assert [row["state"] for row in rows(peer, layout=layout)] == ["timed"]
        if peer.backward:
            assert [row["state"] for row in rows(peer, layout=layout, backward=True)] == ["timed"]


def test_a_long_sequence_in_chunks():
    row = measure.stream(torch.float32, "bshd", tokens=20, chunk=8)
    assert (row["tokens"], row["chunk"]) == (24, 8)
    assert row["error"] <= row["allowed"] == 2.0**-21
    assert min(row["first_per_token"], row["last_per_token"]) > 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the command once. Return its output and files."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--tokens", "3", "--tokens", "1", "--dtype", "float32", "--quick", "--rounds", "2", "--stream", "16"]
    options += ["--only", "ropewalk, in place", "--only", "Hugging", "--no-compile", "--threads", "1"]
    files = {"json": folder / "bench.json", "plot": folder / "bench.png"}
    for name, path in files.items():
        options += [f"--{name}", str(path)]
    threads = torch.get_num_threads()
    done = CliRunner().invoke(cli.main, ["bench", *options])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    return done.output, files


def test_json(ran):
    report = json.loads(ran[1]["json"].read_text())
    assert report["threads"] == 1
    assert report["versions"]["torch"] == torch.__version__
    assert {"date", "machine", "THP_MEM_ALLOC_ENABLE", "environment", "commit"} < set(report)
    assert {"cpu", "cores", "caches", "flags", "transparent_hugepage", "load"} < set(report["machine"])
    assert report["settings"]["tokens"] == [3, 1]
    found = [(row["tokens"], row["backward"], row["contender"]) for row in report["rows"]]
    forward = ["copy_", "ropewalk, in place", "Hugging Face", "Hugging Face, table"]
    assert found == [(n, b, c) for n in (3, 1) for b in (False, True) for c in (forward if not b else forward[::2])]
    assert all(row["state"] == "timed" for row in report["rows"])
    assert [row["tokens"] for row in report["stream"]] == [32]


def test_printed_lines(ran):
    assert "3 tokens, float32, forward: 0.12 MB read and written" in ran[0]
    assert "1 token, float32, forward + backward" in ran[0]
    assert "32 tokens, float32, in chunks of 16" in ran[0]


def test_plot_file(ran):
    assert ran[1]["plot"].read_bytes().startswith(b"\x89PNG")
    figure = plots.times_copy(json.loads(ran[1]["json"].read_text())["rows"])
    forward, both = figure.axes
    assert (forward.get_title(), both.get_title()) == ("float32, forward", "float32, forward + backward")
    assert figure.legends[0].get_texts()[0].get_text() == "copy_"
    assert forward.lines[0].get_xdata().tolist() == [1, 3]
    assert forward.lines[0].get_ydata().tolist() == [1.0, 1.0]


def test_a_busy_machine_is_reported(monkeypatch):
    monkeypatch.setattr(machine, "load", lambda: 7.0)
    said = []
    bench.run(bench.Settings(tokens=[1], dtypes=["float32"], only=["clone"], rounds=1, stream=0), said.append)
    assert any(line.startswith("Warning: the machine is busy (load 7.0)") for line in said)


def test_refusals(tmp_path):
    settings = bench.Settings(tokens=[1], only=["nobody"])
    with pytest.raises(
        ropewalk.RopeError,
        match=r"bench: only must name a contender other than copy_, which is always measured, got 'nobody'\. "
        r"The contenders are 'clone', 'mul_', 'ropewalk', 'ropewalk, in place', ",
    ):
        bench.run(settings, print)
    with pytest.raises(ropewalk.RopeError, match=r"got 'copy_', 'no, body'\. The contenders are 'clone'"):
        bench.run(bench.Settings(tokens=[1], only=["copy_", "no, body"]), print)
    settings = bench.Settings(tokens=[1], only=["clone"])
    with pytest.raises(FileNotFoundError, match=r"none/a\.json"):
        bench.run(settings, print, json_file=tmp_path / "none" / "a.json")
    with pytest.raises(ropewalk.RopeError, match=r"path must end in one of \.png"):
        bench.run(settings, print, json_file=tmp_path / "a.json", plot_file=tmp_path / "a.gif")
    with pytest.raises(ropewalk.RopeError, match=r"the folder of path must exist, got .*none"):
        bench.run(settings, print, json_file=tmp_path / "a.json", plot_file=tmp_path / "none" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ropewalk.RopeError, match=r"path must be writable, got .*folder.png' \(Is a dir"):
        bench.run(settings, print, json_file=tmp_path / "a.json", plot_file=tmp_path / "folder.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("options", "stream"),
    [([], 1_000_000), (["--quick"], 0), (["--quick", "--stream", "5000"], 5000), (["--stream", "7"], 7)],
)
def test_quick_streams_only_with_the_option(options, stream, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run", lambda settings, *_, **__: asked.append(settings))
    done = CliRunner().invoke(cli.main, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert [settings.stream for settings in asked] == [stream]
    assert (asked[0].rounds, asked[0].seconds) == ((5, 5.0) if "--quick" in options else (30, 30.0))


def test_machine_without_proc(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: None)
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    found = machine.describe()
    assert found["commit"] is None
    assert found["machine"]["flags"] == []
    assert found["machine"]["cpu"]
