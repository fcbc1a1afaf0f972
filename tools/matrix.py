"""Install ropewalk and run its tests with other versions of Python, PyTorch and the tools. Run it by hand, outside CI.

    python tools/matrix.py --list          list the rows, which are combinations of versions
    python tools/matrix.py                 run all rows: several hours, and about 10 GB of downloads
    python tools/matrix.py 3.12 lowest     run the rows whose name contains one of the words
    python tools/matrix.py --every 10      run every tenth test of most files
    python tools/matrix.py --every 0       run only the tests that depend most on versions, as those of torch.compile

Each row gets a new virtual environment, where the package is installed (not editable) with its test extra. A CUDA build
of PyTorch is installed without CUDA's libraries: torch_without_cuda.py writes stubs of them. A row is skipped if its
Python is not found. The exit status is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# These take long, and other tests cover the code that they call.
EXCLUDED = ("tests/lab", "tests/test_docs.py")
# These depend most on versions. All of their tests run, even with --every, and tests whose names match COMPILED.
ALWAYS_ALL = (
    "tests/programs/test_bench_on_gpu.py",
    "tests/gpu/test_graph.py",
    "tests/kernels/test_backend.py",
    "tests/kernels/test_build.py",
    "tests/kernels/test_c.py",
    "tests/kernels/test_operators.py",
    "tests/rotation/test_gradients.py",
    "tests/rotation/test_transforms.py",
    "tests/programs/test_cli.py",
    "tests/test_plots.py",
)
COMPILED = re.compile("compil|export|opcheck")


@dataclass(frozen=True)
class Row:
    """A combination of versions.

    Args:
        python: the version of Python.
        torch: the version of PyTorch, or "newest".
        lowest: whether all other packages have the oldest versions that pyproject.toml allows.
    """

    python: str
    torch: str
    lowest: bool = False

    @property
    def name(self) -> str:
        return f"python {self.python}, torch {self.torch}{', lowest' if self.lowest else ''}"


ROWS = [
    *(Row("3.11", torch) for torch in ("2.10", "2.11", "2.12", "2.13", "2.14")),
    Row("3.11", "2.13", lowest=True),
    *(Row(python, "newest") for python in ("3.11", "3.12", "3.13", "3.14")),
]


def lowest(project: dict[str, Any]) -> list[str]:
    """Return requirements for the oldest allowed version of each package, except torch and triton."""
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *extras["plots"],
        *extras["explore"],
        *extras["hub"],
        *extras["lab"],
        *extras["test"],
    ]
    floors = (re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement) for requirement in declared)
    return [f"{floor[1]}=={floor[2]}.*" for floor in floors if floor and floor[1] != "torch"]


def interpreter(version: str) -> str | None:
    """Find a Python of this version on PATH or in pyenv, and return its path, or None."""
    if found := shutil.which(f"python{version}"):
        works = subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0
        if works:  # a command of pyenv on PATH fails unless its version is selected
            return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next((str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))), None)


def commands(row: Row, python: str, environment: Path) -> list[list[str]]:
    """Return the commands of a row: create the environment, install the package, run the tests."""
    own = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install = [own, "-m", "pip", "install", "--quiet"]
    torch = "torch" if row.torch == "newest" else f"torch=={row.torch}.*"
    tests = [argument for path in EXCLUDED for argument in ("--ignore", path)]
    return [
        [python, "-m", "venv", str(environment)],
        [*install, "--no-deps", torch],
        [own, str(ROOT / "tools" / "torch_without_cuda.py")],
        [*install, f"{ROOT}[test]", torch, *(lowest(project) if row.lowest else [])],
        [own, "-m", "pytest", "tests", *tests, "-q", "-p", "matrix", "-p", "no:cacheprovider"],
    ]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Select the sample of tests. pytest loads this file as a plugin and calls this function."""
    every = int(os.environ["ROPEWALK_EVERY"])
    whole = {ROOT / path for path in ALWAYS_ALL}
    items[:] = [
        item
        for i, item in enumerate(items)
        if (every and i % every == 0) or item.path in whole or COMPILED.search(item.nodeid.partition("::")[2].lower())
    ]


def run(row: Row, python: str, every: int, folder: Path) -> tuple[bool, str]:
    """Run a row. Return whether it passes, and the last line of pytest, or the step that failed."""
    environment = folder / row.name.replace(", ", "-").replace(" ", "")
    bin_folder = environment / ("Scripts" if os.name == "nt" else "bin")
    variables = os.environ | {
        "PATH": os.pathsep.join((str(bin_folder), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT / "tools"),
        "ROPEWALK_EVERY": str(every),
        "ROPEWALK_REQUIRE_KERNEL": "1",
    }
    variables.pop("VIRTUAL_ENV", None)
    log = folder / f"{environment.name}.log"
    try:
        with log.open("w") as output:
            for step in commands(row, python, environment):
                code = subprocess.run(step, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT).returncode
                if code and "pytest" not in step:
                    return False, f"{' '.join(step[1:4])} failed: see {log}"
        # The last line: "5 passed in 3s".
        last = log.read_text().splitlines()[-1]
        installed = next(environment.glob("lib*/**/site-packages/torch-*.dist-info"), Path("torch-?")).name
        return code == 0, f"{installed.removesuffix('.dist-info')}: {last}{f'; see {log}' if code else ''}"
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the rows whose name contains one of these words (default: all)")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run every Nth test of most files (default: 1, all tests; 0: none)",
    )
    parser.add_argument(
        "--folder", type=Path, help="the folder for logs, and for environments, which are removed afterwards"
    )
    options = parser.parse_args(arguments)
    if options.every < 0:
        parser.error(f"--every must be at least 0, got {options.every}")
    rows = [row for row in ROWS if not options.words or any(word in row.name for word in options.words)]
    if not rows:
        parser.error(f"no row has {' or '.join(options.words)} in its name; --list shows them")
    if options.list:
        print(*(row.name for row in rows), sep="\n")
        return 0
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="matrix-"))).resolve()
    failed = False
    for row in rows:
        python = interpreter(row.python)
        if python is None:
            print(f"{row.name:34}  skipped: no Python {row.python} was found", flush=True)
            continue
        began = time.monotonic()
        passed, summary = run(row, python, options.every, folder)
        failed |= not passed
        took = f"{(time.monotonic() - began) / 60:4.0f} min"
        print(f"{row.name:34}  {'passed' if passed else 'FAILED'}  {took}  {summary}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
