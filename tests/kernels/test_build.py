"""The choices of CMake and the preprocessor for other processors and compilers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from toolchain import CXX, configure, need, output

CSRC = Path(__file__).parents[2] / "csrc"
BIG_ENDIAN = ("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__")

# A toolchain file that makes CMake treat the compiler as clang-cl, which need not be installed: nothing is compiled.
CLANG_CL = """
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER @PROGRAM@)
  set(CMAKE_${language}_COMPILER_ID_RUN TRUE)
  set(CMAKE_${language}_COMPILER_ID Clang)
  set(CMAKE_${language}_COMPILER_VERSION 19.1)
  set(CMAKE_${language}_SIMULATE_ID MSVC)
  set(CMAKE_${language}_COMPILER_FRONTEND_VARIANT MSVC)
  set(CMAKE_${language}_COMPILER_FORCED TRUE)
endforeach()
set(CMAKE_CXX_COMPILE_FEATURES cxx_std_17)
set(CMAKE_AR @PROGRAM@)
set(CMAKE_LINKER @PROGRAM@)
set(CMAKE_MT @PROGRAM@)
"""

PAGES = """
#include "pages.h"
#include <cstdio>

int main() {
    const long page = sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    char *at = static_cast<char *>(memory);
    at[page + 7] = 1;
    for (int i = 0; i < 3; ++i, at += page) std::printf("%d", ropewalk::is_resident(at + 5));
    if (ropewalk::is_better_through_caches(memory, 2 * page + 2)) return 1;  // its middle is resident
}
"""


def configured(build: Path, *options: str) -> tuple[str, str]:
    """Return the output of CMake and the commands that it generates."""
    said = configure(build, *options)
    return said, output("ninja", "-C", build, "-t", "commands")


def preprocessed(*flags: str) -> str:
    return output(need(CXX), "-std=c++17", "-DROPEWALK_NAMESPACE=baseline", "-E", *flags, CSRC / "kernels.cpp")


def test_a_big_endian_processor_gets_plain_loops() -> None:
    """The vector code separates two bfloat16 numbers by their place in 32 bits, which depends on the byte order."""
    assert "#define ROPEWALK_VECTORS" not in preprocessed("-dM", *BIG_ENDIAN)


def test_without_vectors_the_code_is_standard_cpp() -> None:
    """MSVC has neither vector types nor functions whose names begin with __builtin."""
    ours, names = False, []
    for line in preprocessed(*BIG_ENDIAN).splitlines():
        if marker := re.match(r'# \d+ "(.*?)"', line):
            ours = Path(marker[1]).parent == CSRC
        elif ours:
            names += re.findall(r"__builtin\w*", line)
    assert names == []


def test_every_level_checks_only_features_that_each_compiler_knows() -> None:
    """Clang before 18 does not compile __builtin_cpu_supports("f16c")."""
    for path in (CSRC / "CMakeLists.txt", CSRC / "ropewalk.cpp"):
        assert not re.search(r"cpu_supports\(\W*f16c|add_kernels\(\w+ f16c", path.read_text()), path


def test_omitted_levels_are_reported(tmp_path: Path) -> None:
    said, commands = configured(tmp_path, "-DROPEWALK_avx512=OFF")
    assert "CPU kernel avx512 is left out" in said
    assert "CPU kernel avx512_bf16 is left out" in said
    assert "ROPEWALK_NAMESPACE=baseline" in commands
    assert "avx512" not in commands


def test_clang_cl_fuses_no_products(tmp_path: Path) -> None:
    toolchain = tmp_path / "clang-cl.cmake"
    toolchain.write_text(CLANG_CL.replace("@PROGRAM@", need(CXX)))
    levels = ("-DROPEWALK_avx2=ON", "-DROPEWALK_avx512=OFF")
    _, commands = configured(tmp_path / "build", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", *levels)
    compiled = [line for line in commands.splitlines() if line.endswith("kernels.cpp")]
    assert len(compiled) == 2
    for line in compiled:
        assert "/clang:-ffp-contract=off" in line


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports which pages are in memory")
def test_pages_in_memory(tmp_path: Path) -> None:
    """Only the middle one of three pages was written. How large outputs are stored depends on it."""
    (tmp_path / "pages.cpp").write_text(PAGES)
    output(need(CXX), "-std=c++17", f"-I{CSRC}", tmp_path / "pages.cpp", "-o", tmp_path / "pages")
    assert output(tmp_path / "pages") == "010"


def test_the_binding_uses_no_function_outside_the_stable_abi() -> None:
    """Only builds for Python 3.12 and newer would detect this, and the tests run in a build for 3.11."""
    outside = r"\bPy\w+_(?:GET_\w+|CallOneArg|CallMethodNoArgs|CallMethodOneArg|AS_\w+|READ\w*)\b|\b_Py\w+"
    for path in CSRC.glob("*"):
        if path.suffix in (".cpp", ".h"):
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            assert re.findall(outside, code) == [], path
    assert re.findall(outside, "PyTuple_GET_SIZE(x), PyObject_CallOneArg(f, x), _PyObject_Call(f)") != []
