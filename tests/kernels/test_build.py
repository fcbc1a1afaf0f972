"""The choices of CMake and the preprocessor for other processors and compilers."""

from __future__ import annotations

import re
from pathlib import Path

from toolchain import CXX, configure, need, output

CSRC = Path(__file__).parents[2] / "csrc"
BIG_ENDIAN = ("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__")

# A toolchain file that makes CMake take the compiler for clang-cl. Nothing is compiled, so none has to be there.
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


def configured(build: Path, *options: str) -> tuple[str, str]:
    """What CMake says, and the commands that it makes."""
    said = configure(build, *options)
    return said, output("ninja", "-C", build, "-t", "commands")


def preprocessed(*flags: str) -> str:
    return output(need(CXX), "-std=c++17", "-DROPEWALK_NAMESPACE=baseline", "-E", *flags, CSRC / "kernels.cpp")


def test_a_big_endian_processor_gets_plain_loops() -> None:
    """The vectors take two bfloat16 apart by their place in 32 bits, which is the other one there."""
    assert "#define ROPEWALK_VECTORS" not in preprocessed("-dM", *BIG_ENDIAN)


def test_without_vectors_there_is_nothing_but_standard_cpp() -> None:
    """MSVC has no vectors, and no function whose name begins with __builtin."""
    ours, names = False, []
    for line in preprocessed(*BIG_ENDIAN).splitlines():
        if marker := re.match(r'# \d+ "(.*?)"', line):
            ours = Path(marker[1]).parent == CSRC
        elif ours:
            names += re.findall(r"__builtin\w*", line)
    assert names == []


def test_every_level_asks_only_what_each_compiler_can_answer() -> None:
    """Clang before 18 refuses __builtin_cpu_supports("f16c"), and with it the whole file."""
    for path in (CSRC / "CMakeLists.txt", CSRC / "ropewalk.cpp"):
        assert not re.search(r"cpu_supports\(\W*f16c|add_kernels\(\w+ f16c", path.read_text()), path


def test_a_level_that_is_left_out_is_named_and_so_are_those_above_it(tmp_path: Path) -> None:
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
