"""Test that the benchmark times only correct contenders, reports the others, and writes its results.

Speed is not tested.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import oracle
import ropewalk
from ropewalk import plots
from ropewalk.tools import bench, cli
from ropewalk.tools.bench import machine, measure, memory, sweep
from ropewalk.tools.bench.case import BASE, HEAD_DIM, Case
from ropewalk.tools.bench.clocks import OnCpu, Timed
from ropewalk.tools.bench.contenders import CONTENDERS, Call, Contender
from ropewalk.tools.bench.peers import PEERS

BY_NAME = {one.name: one for one in (*CONTENDERS, *PEERS)}
EAGER = [one for one in CONTENDERS if "compiled" not in one.name]
ONLY: dict = {"only": ["clone", "mul_"], "compiled": False}
MODULES = ("rotary_embedding_torch", "onnxruntime", "mlx.core", "jax", "kernels", "kernels", "vllm._C")

INSTALLED = [
    (module, peer) for module, peer in zip(MODULES, PEERS, strict=True) if module != "kernels"
]  # needs a network


def rows(*contenders, tokens=5, dtype=torch.float32, backward=False):
    case = Case(tokens, dtype, "forward + backward" if backward else "forward")
    return measure.rows(case, contenders, OnCpu(), rounds=2, seconds=9.0)


def returns(make, **how):
    """Return a contender whose result is that of `make` for the case, q, k and the gradients."""
    return Contender("made up", "half", lambda case: lambda inputs: Call(lambda: make(case, *inputs)), **how)


def turned(case, q, k, *grads, pairing="half", late=0):
    rope = ropewalk.Rope(head_dim=HEAD_DIM, base=BASE, pairing=pairing)
    return rope.at(case.positions - late)(q, k, layout="bshd")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_contender_is_right(dtype, backward):
    found = rows(*EAGER, dtype=dtype, backward=backward)
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
    report = bench.run(bench.Settings(tokens=[2], rounds=1, compiled=False, backward=False), said.append)
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


@pytest.mark.parametrize(("module", "peer"), INSTALLED)
def test_installed_peers_are_right(module, peer):
    pytest.importorskip(module)
    assert [row["state"] for row in rows(peer)] == ["timed"]
    if peer.backward:
        assert [row["state"] for row in rows(peer, backward=True)] == ["timed"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the command once. Return its output and files."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--tokens", "3", "--tokens", "1", "--dtype", "float32", "--quick", "--rounds", "2"]
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
    assert {"date", "machine", "environment", "commit"} < set(report)
    assert {"cpu", "make", "cores", "caches", "flags", "transparent_hugepage", "load"} < set(report["machine"])
    assert report["settings"]["tokens"] == [3, 1]
    found = [(row["tokens"], row["backward"], row["contender"]) for row in report["rows"]]
    forward = ["copy_", "ropewalk, in place", "Hugging Face", "Hugging Face, table"]
    assert found == [(n, b, c) for n in (3, 1) for b in (False, True) for c in (forward if not b else forward[::2])]
    assert all(row["state"] == "timed" for row in report["rows"])
    assert {row["memory"] for row in report["rows"]} == {memory.memories()[-1]}
    assert all(0 <= row["faults"][0] <= row["faults"][1] for row in report["rows"])


def test_printed_lines(ran):
    kind = memory.DESCRIBED[memory.memories()[-1]]
    assert f"3 tokens, float32, forward, {kind}: 0.12 MB read and written" in ran[0]
    assert "1 token, float32, forward + backward" in ran[0]


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
    bench.run(bench.Settings(tokens=[1], dtypes=["float32"], only=["clone"], rounds=1), said.append)
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


@pytest.mark.parametrize(("options", "limits"), [([], (30, 30.0)), (["--quick"], (5, 5.0))])
def test_quick_limits_the_rounds(options, limits, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run", lambda settings, *_, **__: asked.append(settings))
    done = CliRunner().invoke(cli.main, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert [(settings.rounds, settings.seconds) for settings in asked] == [limits]


@pytest.mark.skipif(memory.memories() == ("unknown",), reason="only glibc can be told")
def test_new_tensors_are_in_the_memory_that_the_table_names():
    """1,024 tokens are 16 MiB of q and 4 MiB of k in float32: 1,024 and 5,120 pages of 4 KiB, if they are not large.

    The process is a new one: memory that other tests have freed would serve new tensors.
    """
    program = (
        "import json, ropewalk.tools.bench as bench\n"
        f"settings = bench.Settings(tokens=[8, 1024], dtypes=['float32'], backward=False, rounds=3, **{ONLY})\n"
        "print(json.dumps(bench.run(settings, lambda *_: None)['rows']))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    rows = json.loads(ran.stdout)
    assert [(row["memory"], row["tokens"], row["contender"]) for row in rows] == [
        *(("new", 1024, name) for name in ("copy_", "clone")),
        *(("kept", n, name) for n in (8, 1024) for name in ("copy_", "clone", "mul_")),
    ]
    faults = {(row["memory"], row["tokens"], row["contender"]): row["faults"] for row in rows}
    assert faults["new", 1024, "clone"][0] >= 20
    assert faults["kept", 1024, "clone"][1] <= 1
    assert faults["new", 1024, "copy_"][1] <= 1


def test_elsewhere_the_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(memory, "resource", None)
    said = []
    found = bench.run(bench.Settings(tokens=[1024], dtypes=["float32"], backward=False, rounds=1, **ONLY), said.append)
    assert [(row["memory"], row["faults"]) for row in found["rows"]] == [("unknown", [0, 0])] * 3
    assert any("new tensors in memory of unknown origin" in line for line in said)


def test_the_hub_kernel_is_called_as_its_file_says(monkeypatch):
    """`apply_rotary(x1, x2, cos, sin, out1, out2, conj)` of kernels-community/rotary 2 rotates halves."""

    def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
        assert not conj
        assert x1.shape[-2:] == cos.shape[-2:]
        rotated = x1 * cos - x2 * sin, x1 * sin + x2 * cos
        out1.copy_(rotated[0])
        out2.copy_(rotated[1])

    kernels = types.SimpleNamespace(
        get_kernel=lambda name, version: {
            ("kernels-community/rotary", 2): types.SimpleNamespace(apply_rotary=apply_rotary)
        }[name, version]
    )
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    for dtype in (torch.float32, torch.bfloat16):
        found = rows(BY_NAME["hub kernel"], BY_NAME["hub kernel, in place"], dtype=dtype)
        assert [row["state"] for row in found] == ["timed"] * 2, found


def test_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sweep, "FORMS", [one for one in sweep.FORMS if one.name not in ("16", "32", "160", "192", "256")]
    )
    said, file = [], tmp_path / "sweep.json"
    found = bench.run_sweep(bench.SweepSettings(tokens=5, rounds=2), said.append, json_file=file)
    names = [form.name for form in sweep.FORMS for _ in range(2)]
    assert [row["form"] for row in found["rows"]] == names * 2
    assert [row["in_place"] for row in found["rows"]] == [False, True] * (len(names))
    assert {row["state"] for row in found["rows"]} == {"timed"}
    usual = found["rows"][1]
    for row in found["rows"][1 : len(names) : 2]:
        assert row["times_128"] == pytest.approx(row["median"] / row["bytes"] / (usual["median"] / usual["bytes"]))
    assert usual["bytes"] == 5 * (32 + 8) * 128 * 4
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    assert "bfloat16: median, and time per byte relative to heads of 128" in said


def test_a_wrong_form_is_not_timed(monkeypatch):
    monkeypatch.setattr(sweep, "FORMS", [one for one in sweep.FORMS if one.name in ("128", "20 of 80")])
    right, late = ropewalk.Rope.at, lambda self, positions: right(self, positions - int(self.head_dim == 80))
    monkeypatch.setattr(ropewalk.Rope, "at", late)
    said = []
    found = bench.run_sweep(bench.SweepSettings(tokens=5, dtypes=["float32"], rounds=1), said.append)
    assert [row["state"] for row in found["rows"]] == ["timed", "timed", "wrong", "wrong"]
    assert any("wrong" in line for line in said)


def test_the_command_sweeps(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(bench, "run_sweep", lambda settings, say, json_file: asked.append((settings, json_file)))
    options = ["--sweep", "--tokens", "2k", "--dtype", "bfloat16", "--rounds", "3", "--seconds", "4", "--threads", "1"]
    done = CliRunner().invoke(cli.main, ["bench", *options, "--json", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    settings = bench.SweepSettings(tokens=2048, dtypes=("bfloat16",), threads=1, rounds=3, seconds=4.0)
    assert asked == [(settings, tmp_path / "a.json")]
    for option in (["--only", "x"], ["--tokens", "4"], ["--decode"], ["--rows", "1"], ["--no-backward"]):
        assert CliRunner().invoke(cli.main, ["bench", "--sweep", "--tokens", "3", *option]).exit_code == 1


def test_machine_without_proc(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: None)
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
    found = machine.describe()
    assert found["commit"] is None
    assert found["machine"]["flags"] == []
    assert found["machine"]["cpu"]
