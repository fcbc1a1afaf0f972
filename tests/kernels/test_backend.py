"""ROPEWALK_BACKEND, and a build without the kernels. Each test starts a process, because the variable is read once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import ropewalk

NOT_BUILT = "not built when ropewalk was installed, which requires a C++17 compiler and the Python headers"

# The helpers of each process: `record_calls` counts calls of the compiled code; `works` runs everything and checks it.
PRELUDE = """
import sys
sys.path.insert(0, {tests!r})

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "ropewalk.kernels._cpu":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

if {without!r}:
    sys.meta_path.insert(0, Without())

import torch
from torch.func import vmap
from ropewalk import RopeError

try:
    from kernel_cases import check, expected
    from ropewalk import Rope, Rotation
except RopeError as e:
    print(e)
    sys.exit()

calls = []

def record_calls():
    from ropewalk.kernels import cpu
    for name in ("rotate", "table_gradient", "angles", "rotate_plain", "angles_plain"):
        def call(*args, name=name, function=getattr(cpu, name, None)):
            done = function(*args)
            if done is not None or not name.endswith("_plain"):
                calls.append(name.removesuffix("_plain"))
            return done
        setattr(cpu, name, call)

def works():
    rope, q, k = Rope(8, 1e4, "half"), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    at = rope.at(torch.arange(5))
    for x, y in zip((q, k), at(q, k, layout="bshd")):
        check(y, *expected(x, at.cos, at.sin, "bshd", "half", 0, False), "bshd", "new")
    mine = q.clone()
    at.apply_(mine, layout="bshd")
    check(mine, *expected(q, at.cos, at.sin, "bshd", "half", 0, False), "bshd", "in place")
    cos, sin = at.cos.clone().requires_grad_(), at.sin.clone().requires_grad_()
    q.requires_grad_()
    incoming = torch.randn(2, 5, 3, 8)
    Rotation(cos, sin, pairing="half")(q, layout="bshd").backward(incoming)
    check(q.grad, *expected(incoming, cos, sin, "bshd", "half", 0, True), "bshd", "gradient")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        at(q.detach(), layout="bshd")
    return "ropewalk::rotate" in [event.name for event in profile.events()]

def refusal(function):
    try:
        function()
    except RopeError as e:
        return str(e)
"""


def run(backend: str | None, program: str, without: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "ROPEWALK_BACKEND"}
    if backend is not None:
        environment["ROPEWALK_BACKEND"] = backend
    prelude = PRELUDE.format(tests=str(Path(__file__).parents[1] / "support"), without=without)
    ran = subprocess.run(
        [sys.executable, "-c", prelude + program], capture_output=True, text=True, env=environment, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_reference_never_calls_the_kernel() -> None:
    run("reference", "record_calls()\nassert not works()\nassert calls == [], calls")


@pytest.mark.parametrize("backend", [None, ""])
def test_auto_calls_the_kernel_where_possible(built: None, backend: str | None) -> None:
    program = """
record_calls()
assert works()
assert set(calls) == {"rotate", "table_gradient", "angles"}, calls
del calls[:]
x, at = torch.randn(4, 5, 3, 8), Rope(8, 1e4, "half").at(torch.arange(5))
vmap(lambda x: at(x, layout="thd"))(x)
assert calls == ["angles"], calls
"""
    assert run(backend, program) == ""  # a refusal would be printed


def test_kernel_raises_where_no_kernel_applies(built: None) -> None:
    program = """
record_calls()
assert works()
assert set(calls) == {"rotate", "table_gradient", "angles"}, calls
x, at = torch.randn(4, 5, 3, 8), Rope(8, 1e4, "half").at(torch.arange(5))
del calls[:]
print(refusal(lambda: vmap(lambda x: at(x, layout="thd"))(x)))
print(refusal(lambda: at.to("meta")(x.to("meta"), layout="bshd")))
with torch.autograd.forward_ad.dual_level():
    print(refusal(lambda: at(x, layout="bshd")))
print(refusal(lambda: vmap(lambda p: Rope(8, 1e4, "half").at(p).cos)(torch.arange(6).reshape(2, 3))))
assert calls == [], calls
"""
    lines = run("kernel", program).splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith(
            "ROPEWALK_BACKEND=kernel: tensors must be plain tensors on the CPU or a GPU, outside of transforms"
        )
        assert line.endswith("Set the variable to auto.")
    assert "got Tensor on meta" in lines[1]


def test_another_value_is_refused() -> None:
    (line,) = run("nonsense", "").splitlines()
    assert line.startswith("ROPEWALK_BACKEND: ")
    for word in ("'auto'", "'reference'", "'kernel'", "got 'nonsense'"):
        assert word in line


def test_works_without_the_extension() -> None:
    program = """
from ropewalk.kernels import cpu
record_calls()
assert not works()
assert calls == [], calls
print(cpu.unavailable())
"""
    (reason,) = run("auto", program, without=True).splitlines()
    assert reason == NOT_BUILT


@pytest.mark.parametrize(("variable", "count"), [(None, 1), ("auto", 1), ("reference", 0)])
def test_a_missing_extension_is_a_warning_at_the_first_rotation(variable: str | None, count: int) -> None:
    program = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    at = Rope(8, 1e4, "half").at(torch.arange(5))
    assert not caught
    for _ in range(2):
        at(torch.randn(5, 1, 8), layout="thd")
        at.apply_(torch.randn(5, 1, 8), layout="thd")
print(*(w.message for w in caught), sep="\\n")
"""
    lines = run(variable, program, without=True).split("\n")[:-1]
    expected = f"ropewalk's CPU kernel is not usable ({NOT_BUILT}), so rotations on the CPU run in plain PyTorch"
    assert [line.partition(", which is slower.")[0] for line in lines if line] == [expected] * count


@pytest.mark.parametrize("content", [None, b"garbage"], ids=["missing", "broken"])
def test_doctor_distinguishes_a_missing_from_a_broken_extension(tmp_path: Path, content: bytes | None) -> None:
    shutil.copytree(
        Path(ropewalk.__file__).parent, tmp_path / "ropewalk", ignore=shutil.ignore_patterns("*.so", "*.pyd")
    )
    extension = tmp_path / "ropewalk" / "kernels" / ("_cpu" + EXTENSION_SUFFIXES[0])
    if content is not None:
        extension.write_bytes(content)
    # -S: without the hook of an editable install, which knows another file.
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "ropewalk", "doctor"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=600,
    )
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("cpu kernel"))
    if content is None:
        assert line == f"cpu kernel  not usable: {NOT_BUILT}"
    else:
        assert line.startswith("cpu kernel  not usable: cannot be loaded: ")
        assert str(extension) in line
        assert "compiler" not in line


def test_without_the_extension_kernel_is_refused_with_the_reason() -> None:
    program = """
print(refusal(lambda: Rope(8, 1e4, "half").at(torch.arange(5))))
print(refusal(lambda: Rotation(torch.ones(5, 4), torch.ones(5, 4), pairing="half")(torch.ones(5, 1, 8), layout="thd")))
"""
    lines = run("kernel", program, without=True).splitlines()
    assert lines == 2 * [
        f"ROPEWALK_BACKEND=kernel: the CPU kernel must be available, got {NOT_BUILT}. "
        "Install what is missing, or unset the variable."
    ]
