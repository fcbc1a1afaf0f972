"""Make every file of a release and check it. Nothing is published. RELEASE.md says when to run this.

    python tools/release.py                     write the files to dist/, which must be new or empty
    python tools/release.py --key ~/.ssh/key    sign with this SSH key, instead of a new key that is thrown away
    python tools/release.py --twice             build each wheel twice and compare the bytes
    python tools/release.py --emulator "qemu-aarch64-static -L ROOT ROOT/usr/bin/python3.13"

It needs Linux on x86-64, GCC, ssh-keygen and the extras "docs", "explore" and "release". Zig compiles the wheels, so
that they work with glibc 2.28. Each wheel for x86-64 and the sdist are installed into a new environment without a
compiler, where README.md's first example runs, and the tests that the workflow runs with each wheel. The command ends
with a table of the files and their checks, and with a list of what did not run. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from matrix import interpreter

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# The Pythons that share a wheel. Python 3.11 has its own, and any of the others can build the wheel for 3.12 and newer.
BUILDERS = (("3.11",), ("3.12", "3.13", "3.14"))
LARGEST_WHEEL, LARGEST_SDIST = 3 * 2**19, 2**20
NEWEST_GLIBC = 28  # manylinux_2_28
MODULE_TEST = ROOT / "tests" / "kernels" / "module_alone.py"
MINOR = "import sys; print(sys.version_info[1], end='')"
COMPILERS = re.compile(r"gcc|g\+\+|clang|^cc$|^c\+\+$|^c[89]9|^cpp$|^cmake$|nvcc")
# What only an account knows. --sdist-url and [project.urls] in pyproject.toml replace the addresses.
PLACEHOLDER = "https://ropewalk.invalid"
# A quarter turn by a variant of the hub's kernel, loaded by its id, which must import nothing of an installed ropewalk.
QUARTER_TURN = """
import importlib.util, json, pathlib, sys, torch
sys.modules["ropewalk"] = None
folder = pathlib.Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
q, cos, sin = torch.randn(1, 2, 3, 8), torch.zeros(1, 3, 8), torch.ones(1, 3, 8)
for turned in sys.modules[name].apply_rotary_pos_emb(q, q, cos, sin):
    assert torch.equal(turned, torch.cat((-q[..., 4:], q[..., :4]), -1)), turned
"""


class CheckError(Exception):
    """A check has failed."""


def run(*command: str | Path, stdin: Path = Path(os.devnull), **variables: str | None) -> str:
    """Run a command and return its output. Set environment variables by name; None removes one.

    Raises:
        CheckError: the command fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        name: value for name, value in (os.environ | {"PATH": path} | variables).items() if value is not None
    }
    with stdin.open() as file:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if ran.returncode:
        raise CheckError(f"{' '.join(map(str, command))}\n{ran.stdout[-4000:]}")
    return ran.stdout


def require(holds: bool, otherwise: str) -> None:
    """Raise a CheckError with the message `otherwise` unless `holds`."""
    if not holds:
        raise CheckError(otherwise)


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


def compilers(processor: str, folder: Path) -> dict[str, str | None]:
    """Write compilers of wheels for a processor into the folder. Return the environment variables that select them."""
    found = importlib.util.find_spec("ziglang")
    require(found is not None, 'ziglang is not installed: pip install ".[docs,explore,release]"')
    zig = Path(found.submodule_search_locations[0]) / "zig"
    for name in ("cc", "c++"):
        script = f'#!/bin/sh\nexec "{zig}" {name} -target {processor}-linux-gnu.2.{NEWEST_GLIBC} -O2 "$@"\n'
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    # Zig compiles its C++ runtime anew for each set of flags. So -O2 is always set, and CMake's trials do not link.
    trials = "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY"
    # In Zig's runtime, __builtin_cpu_supports is always false. GCC's finds the instruction sets.
    runtime = run("gcc", "-print-libgcc-file-name").strip() if processor == "x86_64" else ""
    return {
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "CMAKE_ARGS": trials,
        "LDFLAGS": f"-s {runtime}",
        "SKBUILD_INSTALL_STRIP": "false",  # the linker does, for both processors
        "ROPEWALK_REQUIRE_KERNEL": "1",
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
    }


def build_wheel(sdist: Path, python: str, processor: str, folder: Path) -> Path:
    """Build a wheel from the sdist, and let auditwheel set its platform tag. Return its path in `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary)
        variables = compilers(processor, plain)
        suffix = f".cpython-3{run(python, '-c', MINOR)}-{processor}-linux-gnu.so"
        pip = (python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", plain, sdist)
        run(*pip, **variables, SETUPTOOLS_EXT_SUFFIX=suffix)
        before = set(folder.glob("*.whl"))
        # Every file in the archive gets the same time stamp, which is the default of scikit-build-core.
        epoch = os.environ.get("SOURCE_DATE_EPOCH", "1667997441")
        repair = (sys.executable, "-m", "auditwheel", "repair", "-w", folder, *plain.glob("*.whl"))
        run(*repair, SOURCE_DATE_EPOCH=epoch)
        return next(iter(set(folder.glob("*.whl")) - before))


def glibc(wheel: Path) -> int:
    """Return the minor version of the oldest glibc 2.x that the name of the wheel promises."""
    minors = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    require(bool(minors), f"{wheel.name} is not manylinux")
    return min(map(int, minors))


def check_wheel(wheel: Path) -> str:
    """Check size, glibc, metadata and stable ABI of a wheel. Return what was checked."""
    require(wheel.stat().st_size < LARGEST_WHEEL, f"{wheel.name} has {wheel.stat().st_size:,} bytes")
    require(glibc(wheel) <= NEWEST_GLIBC, f"{wheel.name} needs a newer glibc than 2.{NEWEST_GLIBC}")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    if "-abi3-" not in wheel.name:
        return f"symbols of glibc 2.{glibc(wheel)}, metadata"
    run(sys.executable, "-m", "abi3audit", "--strict", wheel)
    return f"symbols of glibc 2.{glibc(wheel)}, stable ABI, metadata"


def check_module(wheel: Path, python: list[str]) -> str:
    """Test the compiled module without torch, in this Python. Return what was checked."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        module = archive.extract(next(name for name in names if "/_cpu." in name and name.endswith(".so")), folder)
        said = run(*python, MODULE_TEST, module).strip()
    here = "x86_64" in wheel.name and " avx2 " in Path("/proc/cpuinfo").read_text()
    require("avx2" in said or not here, f"{wheel.name} does not find AVX2, which this machine has: {said}")
    return f"module alone in Python 3.{run(*python, '-c', MINOR)}: {said}"


def check_installed(file: Path, python: str, backend: str | None) -> str:
    """Run README.md's first example and the quick tests with an installed wheel or sdist, without a compiler on PATH.

    The example fails if it cannot use the `backend`, whereas the tests skip what needs it. Return what was checked.
    """
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert example is not None
    tests = PYPROJECT["tool"]["cibuildwheel"]["test-command"].format(project=ROOT).split()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as programs:
        run(python, "-m", "venv", folder)
        own = Path(folder) / "bin" / "python"
        install = (own, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
        run(*install, "--no-deps", "torch")
        run(own, ROOT / "tools" / "torch_without_cuda.py")
        link_programs(Path(programs))
        without_compiler = {"PATH": f"{folder}/bin:{programs}", "CC": None, "CXX": None}
        run(*install, f"{file}[test]", **without_compiler)
        run(own, "-c", example[1], ROPEWALK_BACKEND=backend, **without_compiler)
        quick = ("-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not slow")
        output = run(own, "-m", *tests, *quick, **without_compiler)
    return f"installed without a compiler in Python 3.{run(python, '-c', MINOR)}: README's example, {summary(output)}"


def summary(output: str) -> str:
    """Return the numbers in the last line of pytest's output, without the time."""
    return re.sub(r" in [\d.]+s.*", "", output.splitlines()[-1])


def link_programs(folder: Path) -> None:
    """Fill the folder with links to all programs on PATH except compilers."""
    for directory in os.get_exec_path():
        for program in sorted(Path(directory).glob("*")):
            if not COMPILERS.search(program.name) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)


def build_site(folder: Path, version: str) -> Path:
    """Build the documentation with the explorer's page, and pack it. Return the archive."""
    run(sys.executable, "-m", "zensical", "build", "--strict", "--clean")
    run(sys.executable, ROOT / "tools" / "explorer_for_docs.py")
    return Path(shutil.make_archive(str(folder / f"ropewalk-{version}-site"), "gztar", ROOT / "site"))


def build_hub(folder: Path, version: str, wheels: list[Path]) -> Path:
    """Write the kernel for Hugging Face's hub with the modules of the wheels, rotate with it, and pack it."""
    with tempfile.TemporaryDirectory() as temporary:
        hub = Path(temporary) / "hub"
        run(sys.executable, ROOT / "tools" / "hub_kernel.py", hub, *wheels)
        for variant, backend in (("torch-cpu", "reference"), ("torch-stable-abi210-cpu-x86_64-linux", "kernel")):
            run(sys.executable, "-c", QUARTER_TURN, hub / "build" / variant, ROPEWALK_BACKEND=backend)
        return Path(shutil.make_archive(str(folder / f"ropewalk-{version}-hub"), "gztar", hub))


def notes(changelog: str, version: str) -> tuple[str, str]:
    """Return title and text of the section of CHANGELOG.md for this version, or of Unreleased if there is none."""
    for title in (rf"{re.escape(version)}(?: [^\n]*)?", "Unreleased"):
        if found := re.search(rf"^## ({title})\n(.*?)(?=^## |\Z)", changelog, re.M | re.S):
            require(bool(found[2].strip()), f"the section {found[1]} of CHANGELOG.md is empty")
            return found[1], found[2].strip() + "\n"
    raise CheckError(f"CHANGELOG.md has no section {version} or Unreleased")


def recipe(version: str, sha256: str, url: str) -> dict[str, Any]:
    """Return the recipe for conda-forge, in version 1 of its format."""
    conda = [re.sub("^torch(?=>)", "pytorch", requirement) for requirement in PROJECT["dependencies"]]
    spaced = {"run": conda, "host": PYPROJECT["build-system"]["requires"]}
    needs = {name: [requirement.replace(">=", " >=") for requirement in spaced[name]] for name in spaced}
    cross = {"if": "build_platform != target_platform", "then": ["python", "cross-python_${{ target_platform }}"]}
    install = "${{ PYTHON }} -m pip install . -vv --no-deps --no-build-isolation"
    return {
        "schema_version": 1,
        "context": {"version": version},
        "package": {"name": "ropewalk", "version": "${{ version }}"},
        "source": {"url": url, "sha256": sha256},
        "build": {
            "number": 0,
            "skip": f'match(python, "<{PROJECT["requires-python"].removeprefix(">=")}")',
            "script": {"env": {"ROPEWALK_REQUIRE_KERNEL": "1"}, "content": install},
        },
        "requirements": {
            "build": [cross, "${{ compiler('cxx') }}", "${{ stdlib('c') }}", "cmake", "ninja"],
            "host": ["python", "pip", *needs["host"]],
            "run": ["python", *needs["run"]],
        },
        "tests": [
            {"python": {"imports": ["ropewalk", "ropewalk.kernels._cpu"], "pip_check": True}},
            {"script": ["ropewalk doctor"]},
        ],
        "about": {
            "homepage": PROJECT.get("urls", {}).get("Homepage", PLACEHOLDER),
            "summary": PROJECT["description"],
            "license": PROJECT["license"],
            "license_file": PROJECT["license-files"],
        },
        "extra": {"recipe-maintainers": ["MAINTAINER"]},
    }


def write_recipe(path: Path, content: dict[str, Any]) -> str:
    """Write the recipe, and let rattler-build render it for each platform. Return what was checked."""
    import yaml
    from rattler_build import RenderConfig, Stage0Recipe, VariantConfig
    from rattler_build.tool_config import PlatformConfig

    path.write_text(yaml.safe_dump(content, sort_keys=False, width=120))
    variants = VariantConfig({"python": ["3.12.* *_cpython"], "c_stdlib": ["sysroot"]})
    platforms = ("linux-64", "linux-aarch64", "osx-arm64", "win-64")
    for target in platforms:
        config = RenderConfig(platform=PlatformConfig(target_platform=target, build_platform="linux-64"))
        (rendered,) = Stage0Recipe.from_file(path).render(variants, config)
        require(rendered.recipe.to_dict()["source"][0]["sha256"] == content["source"]["sha256"], f"{path.name}: sha256")
    return f"rendered by rattler-build for {', '.join(platforms)}"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sign(files: list[Path], key: Path | None) -> list[Path]:
    """Write and sign the SHA-256 sums of the files, and verify the signature. Return the paths of both."""
    sums = files[0].parent / "SHA256SUMS"
    sums.write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
    with tempfile.TemporaryDirectory() as temporary:
        if key is None:
            key = Path(temporary) / "key"
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        run("ssh-keygen", "-Y", "sign", "-n", "file", "-f", key, sums)
        signers = Path(temporary) / "signers"
        signers.write_text(f"release {Path(f'{key}.pub').read_text()}")
        signature = Path(f"{sums}.sig")
        run("ssh-keygen", "-Y", "verify", "-n", "file", "-I", "release", "-f", signers, "-s", signature, stdin=sums)
    return [sums, signature]


def make(folder: Path, options: argparse.Namespace) -> None:
    """Make and check all files in the folder, and print the table."""
    here = (sys.platform, platform.machine())
    require(here == ("linux", "x86_64"), "only Linux on x86-64 can test the wheels that this command builds")
    checks: dict[Path, list[str]] = {}
    not_run = ["the wheels for macOS and Windows: only the workflow builds and tests them"]

    def passed(file: Path, what: str) -> None:
        checks.setdefault(file, []).append(what)
        print(f"{file.name}: {what}", flush=True)

    sdist = build_sdist(folder)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist)
    version = sdist.name.removeprefix("ropewalk-").removesuffix(".tar.gz")
    passed(sdist, "content, metadata")

    path = folder / f"ropewalk-{version}-notes.md"
    title, text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    path.write_text(text, encoding="utf-8")
    passed(path, f"the section {title} of CHANGELOG.md")

    path = folder / "recipe.yaml"
    passed(path, write_recipe(path, recipe(version, sha256(sdist), options.sdist_url)))
    not_run.append("recipe.yaml: the build of the conda package, which needs conda-forge's packages, and its linter")

    passed(build_site(folder, version), "strict build, explorer's page, link to it")

    emulated = {f"3.{run(*python, '-c', MINOR)}": python for python in map(shlex.split, options.emulator)}
    for versions in BUILDERS:
        installed = {name: [python] for name in versions if (python := interpreter(name))}
        require(bool(installed), f"there is no Python {' or '.join(versions)}")
        ((first,), *_) = installed.values()
        for processor, pythons in (("x86_64", installed), ("aarch64", emulated)):
            wheel = build_wheel(sdist, first, processor, folder)
            passed(wheel, check_wheel(wheel))
            if options.twice:
                with tempfile.TemporaryDirectory() as other:
                    again = build_wheel(sdist, first, processor, Path(other))
                    require(again.read_bytes() == wheel.read_bytes(), f"{wheel.name} differs from build to build")
                passed(wheel, "the same bytes from two builds")
            for name in versions:
                if name in pythons:
                    passed(wheel, check_module(wheel, pythons[name]))
                else:
                    not_run.append(f"{wheel.name}: the module in Python {name}")
            if processor == "aarch64":
                not_run.append(f"{wheel.name}: README's example and the tests, with PyTorch")
            else:
                passed(wheel, check_installed(wheel, first, "kernel"))
    hub = build_hub(folder, version, sorted(folder.glob("*.whl")))
    passed(hub, "both variants for this processor rotate, without ropewalk")
    not_run.append(f"{hub.name}: the variants for GPUs, and loading with kernels, which tests/integrations does")
    passed(sdist, check_installed(sdist, str(interpreter("3.11")), None))

    by = options.key or "a key of this rehearsal, which is thrown away"
    for file in sign(sorted(checks), options.key):
        passed(file, f"signature by {by}, verified")
    commit = run("git", "describe", "--always", "--dirty").strip()
    print(f"\nropewalk {version}, commit {commit}\n\n| file | bytes | SHA-256 | checked |\n|---|---|---|---|")
    for file, what in checks.items():
        print(f"| {file.name} | {file.stat().st_size:,} | {sha256(file)} | {'; '.join(what)} |")
    print("\nNot run:", *not_run, sep="\n- ")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dist", help="the folder for the files, new or empty (default: dist)"
    )
    parser.add_argument("--key", type=Path, help="the private SSH key that signs; the public one is in KEY.pub")
    parser.add_argument(
        "--sdist-url",
        default=f"{PLACEHOLDER}/ropewalk-${{{{ version }}}}.tar.gz",
        help="where the sdist will be published; conda's recipe names it (default: a placeholder)",
    )
    parser.add_argument(
        "--emulator", action="append", default=[], help="a command that runs a Python for aarch64; may be repeated"
    )
    parser.add_argument("--twice", action="store_true", help="build each wheel twice and compare the bytes")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; pass another --folder or remove its content")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        make(folder, options)
    except CheckError as e:
        print(f"FAILED: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
