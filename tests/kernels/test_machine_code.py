"""The machine code of the innermost loop, over the heads of a token: cos and sin must stay in registers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolchain import configure, output

# Address, instruction and operands in AT&T syntax, without names of functions.
Code = list[tuple[int, str, str]]


def functions(module: Path) -> Iterator[tuple[str, Code]]:
    """Return the name and the code of each function."""
    listing = output("objdump", "-d", "--demangle", "--no-show-raw-insn", "--section=.text", module)
    for part in re.split(r"\n(?=[0-9a-f]+ <)", listing)[1:]:
        header, *lines = part.splitlines()
        found = (re.match(r"\s*([0-9a-f]+):\t(\S+)\s*([^<#]*)", line) for line in lines)
        yield header, [(int(m[1], 16), m[2], m[3].strip()) for m in found if m]


def written(operands: str) -> str:
    return operands.rpartition(",")[2]


def reloads(code: Code) -> list[tuple[int, str, str]]:
    """Return the vector instructions in the loop of a function that access neither a head nor a constant.

    Heads are at addresses that the loop changes, and constants are relative to the address of the instruction. Spilled
    registers are on the stack, and tables are at addresses that do not change.
    """
    jumps = [(int(to, 16), at) for at, name, to in code if name.startswith("j") and re.fullmatch(r"[0-9a-f]+", to)]
    jumps = [(to, at) for to, at in jumps if to <= at]
    assert jumps, "there is no loop"
    begin, end = min(to for to, _ in jumps), max(at for _, at in jumps)
    loop = [instruction for instruction in code if begin <= instruction[0] <= end]
    changed = {written(operands) for _, name, operands in loop if re.match("add|sub|lea|mov", name)}
    stack, before = {"%rsp", "%rbp"}, 0
    while len(stack) > before:  # registers that hold an address on the stack
        before = len(stack)
        for _, name, operands in code:
            copied = name == "lea" or (name == "mov" and "(" not in operands)
            if copied and stack & set(re.findall(r"%r\w+", operands[: operands.rfind(",")])):
                stack.add(written(operands))
    found = []
    for at, name, operands in loop:
        registers = set(re.findall(r"%r\w+", operands))
        if "(" not in operands or not re.search("%[xyz]mm", operands) or registers == {"%rip"}:
            continue
        if stack & registers or not changed & registers:
            found.append((at, name, operands))
    return found


def test_tables_stay_in_registers(tmp_path: Path) -> None:
    if not shutil.which("objdump"):
        pytest.skip("there is no objdump")
    if "kernel avx512_bf16 is left out" in configure(tmp_path):
        pytest.skip("this compiler cannot build for AVX-512")
    output("cmake", "--build", tmp_path, "--target", "kernels_avx512_bf16")
    (module,) = tmp_path.rglob("kernels.cpp.o*")
    loops = {name: reloads(code) for name, code in functions(module) if "::rotate_blocks<" in name}
    for dtype in ("F32", "F64", "BF16", "F16"):
        assert any(f"::{dtype}," in name for name in loops), dtype
    assert {name: found for name, found in loops.items() if found} == {}
