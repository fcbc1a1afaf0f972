"""Test the compiled module without torch, as module_alone.py does, and its binding."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def alone(module: str | Path) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("module_alone.py")
    return subprocess.run([sys.executable, "-S", script, module], capture_output=True, text=True)


def test_it_is_right_without_torch(built: None) -> None:
    found = importlib.util.find_spec("ropewalk.kernels._cpu")
    assert found is not None
    assert found.origin is not None
    ran = alone(found.origin)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("right: baseline")


@pytest.mark.parametrize(
    ("angles", "rotate", "wrong"),
    [("pass", "pass", "check_angles"), ("CORRECT", "pass", "check_rotation")],
    ids=["angles", "rotations"],
)
def test_wrong_numbers_are_found(tmp_path: Path, angles: str, rotate: str, wrong: str) -> None:
    """Test a module that does not change angles, and one that does not change q."""
    correct = """
    at = lambda address: (ctypes.c_int64 * 1000).from_address(address)
    for out, function in ((cos, math.cos), (sin, math.sin)):
        for row in range(rows):
            for i in range(pairs):
                turn = (at(positions)[row] * at(steps)[i] + 2**63) % 2**64 - 2**63
                (ctypes.c_double * 1000).from_address(out)[row * pairs + i] = function(2 * math.pi * turn / 2**64)
"""
    module = tmp_path / "_cpu.py"
    module.write_text(
        f"import ctypes, math\ndef levels(): return ['baseline']\ndef use_level(name): pass\n"
        f"def angles(positions, rows, axis, axes, steps, pairs, factor, dtype, cos, sin, threads):\n"
        f"    {angles.replace('CORRECT', correct.strip())}\ndef rotate(*arguments): {rotate}\n"
    )
    ran = alone(module)
    assert ran.returncode == 1
    assert ran.stderr.count("AssertionError") == 1, ran.stderr
    assert f"in {wrong}" in ran.stderr


def test_the_binding_uses_no_function_outside_the_stable_abi() -> None:
    """Only builds for Python 3.12 and newer would detect this, and the tests run in a build for 3.11."""
    outside = r"\bPy\w+_(?:GET_\w+|CallOneArg|CallMethodNoArgs|CallMethodOneArg|AS_\w+|READ\w*)\b|\b_Py\w+"
    for path in (ROOT / "csrc").glob("*"):
        if path.suffix in (".cpp", ".h"):
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            assert re.findall(outside, code) == [], path
    assert re.findall(outside, "PyTuple_GET_SIZE(x), PyObject_CallOneArg(f, x), _PyObject_Call(f)") != []
