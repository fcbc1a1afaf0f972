"""Test the compiled module of a wheel, and tools/release.py, which makes and checks the files of a release."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import matrix  # noqa: E402
import release  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def alone(module: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", release.MODULE_TEST, module], capture_output=True, text=True)


class TestModule:
    def test_it_is_right_without_torch(self, built: None) -> None:
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
    def test_wrong_numbers_are_found(self, tmp_path: Path, angles: str, rotate: str, wrong: str) -> None:
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

    def test_the_binding_uses_no_function_outside_the_stable_abi(self) -> None:
        """Only builds for Python 3.12 and newer would detect this, and the tests run in a build for 3.11."""
        outside = r"\bPy\w+_(?:GET_\w+|CallOneArg|CallMethodNoArgs|CallMethodOneArg|AS_\w+|READ\w*)\b|\b_Py\w+"
        for path in (ROOT / "csrc").glob("*"):
            if path.suffix in (".cpp", ".h"):
                code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
                assert re.findall(outside, code) == [], path
        assert re.findall(outside, "PyTuple_GET_SIZE(x), PyObject_CallOneArg(f, x), _PyObject_Call(f)") != []


class TestDeclared:
    def test_pythons(self) -> None:
        """Each declared Python has a row in tools/matrix.py and a wheel in tools/release.py."""
        words = (entry.split(" :: ") for entry in PROJECT["project"]["classifiers"])
        declared = {
            entry[-1] for entry in words if entry[:2] == ["Programming Language", "Python"] and "." in entry[-1]
        }
        assert declared == {row.python for row in matrix.ROWS}
        assert declared == {version for versions in release.BUILDERS for version in versions}
        assert PROJECT["project"]["requires-python"] == ">=3.11"

    def test_ci_builds_the_wheels_that_the_script_builds(self) -> None:
        build, stable = PROJECT["tool"]["cibuildwheel"]["build"], PROJECT["tool"]["scikit-build"]["wheel"]["py-api"]
        assert build == [f"cp{versions[0].replace('.', '')}-*" for versions in release.BUILDERS]
        assert build[-1] == f"{stable}-*"


class TestScript:
    def wheel(self, folder: Path, name: str, size: int) -> Path:
        path = folder / f"ropewalk-0.1.0-{name}.whl"
        path.write_bytes(bytes(size))
        return path

    def test_glibc_is_the_oldest_that_is_promised(self, tmp_path: Path) -> None:
        name = "cp312-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.manylinux_2_28_x86_64"
        assert release.glibc(self.wheel(tmp_path, name, 1)) == 17

    def test_a_wheel_for_no_old_glibc_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(release.CheckError, match="not manylinux"):
            release.glibc(self.wheel(tmp_path, "cp311-cp311-linux_x86_64", 1))

    @pytest.mark.parametrize(
        ("name", "size", "otherwise"),
        [
            ("cp311-cp311-manylinux_2_28_x86_64", 3 * 2**19, "1,572,864 bytes"),
            ("cp311-cp311-manylinux_2_34_x86_64", 9, "a newer glibc than 2.28"),
            ("cp311-cp311-manylinux_2_28_x86_64", 9, None),
            ("cp312-abi3-manylinux_2_28_x86_64", 9, None),
        ],
    )
    def test_wheels_are_checked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int, otherwise: str | None
    ) -> None:
        ran = []
        monkeypatch.setattr(release, "run", lambda *command, **_: ran.append(command[2]))
        wheel = self.wheel(tmp_path, name, size)
        if otherwise:
            with pytest.raises(release.CheckError, match=re.escape(otherwise)):
                release.check_wheel(wheel)
        else:
            release.check_wheel(wheel)
            assert ran == (["twine", "abi3audit"] if "abi3" in name else ["twine"])

    @pytest.mark.parametrize(
        ("left_out", "more", "otherwise"),
        [(None, None, None), ("csrc", None, "contains only"), (None, "tests", "'tests'")],
        ids=["right", "without kernels", "with tests"],
    )
    def test_the_sdist_holds_what_installs_and_no_more(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        left_out: str | None,
        more: str | None,
        otherwise: str | None,
    ) -> None:
        tops = {"src", "csrc", "CMakeLists.txt", "pyproject.toml", "LICENSE", more} - {left_out, None}

        def build(*command: str | Path) -> str:
            with tarfile.open(tmp_path / "ropewalk-0.1.0.tar.gz", "w:gz") as archive:
                for top in tops:
                    archive.add(ROOT / "LICENSE", f"ropewalk-0.1.0/{top}/file")
            return ""

        monkeypatch.setattr(release, "run", build)
        if otherwise:
            with pytest.raises(release.CheckError, match=otherwise):
                release.build_sdist(tmp_path)
        else:
            assert release.build_sdist(tmp_path).name == "ropewalk-0.1.0.tar.gz"

    def test_the_declared_sdist_is_that(self) -> None:
        declared = {entry.strip("/") for entry in PROJECT["tool"]["scikit-build"]["sdist"]["include"]}
        assert declared == {"src", "csrc", "CMakeLists.txt", "pyproject.toml", "CHANGELOG.md", "LICENSE", "README.md"}

    def test_a_folder_that_is_not_empty_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "old.whl").touch()
        with pytest.raises(SystemExit):
            release.main(["--folder", str(tmp_path)])
        assert "is not empty" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changelog", "title", "text"),
        [
            ("# C\n\n## Unreleased\n\n### Added\n\n- a\n\n## 0.0.9\n\n- b\n", "Unreleased", "### Added\n\n- a\n"),
            ("## Unreleased\n\n## 0.1.0 (2026-12-01)\n\n- a\n\n## 0.0.9\n", "0.1.0 (2026-12-01)", "- a\n"),
            ("## 0.1.01\n\n- c\n\n## 0.1.0\n\n- a\n", "0.1.0", "- a\n"),
        ],
    )
    def test_the_notes_are_the_section_of_the_version(self, changelog: str, title: str, text: str) -> None:
        assert release.notes(changelog, "0.1.0") == (title, text)

    @pytest.mark.parametrize(
        ("changelog", "otherwise"),
        [("## 0.0.9\n\n- b\n", "no section 0.1.0 or Unreleased"), ("## Unreleased\n\n## 0.0.9\n\n- b\n", "is empty")],
    )
    def test_a_release_without_notes_is_refused(self, changelog: str, otherwise: str) -> None:
        with pytest.raises(release.CheckError, match=otherwise):
            release.notes(changelog, "0.1.0")

    def test_the_recipe_has_what_pyproject_declares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        declared = {"dependencies": ["click>=8.1", "torch>=2.10"], "requires-python": ">=3.11"}
        monkeypatch.setattr(release, "PROJECT", release.PROJECT | declared)
        monkeypatch.setattr(release, "PYPROJECT", {"build-system": {"requires": ["nanobind>=3.1"]}})
        recipe = release.recipe("0.2.0", "ab" * 32, "https://example.org/${{ version }}.tar.gz")
        assert recipe["context"] == {"version": "0.2.0"}
        assert recipe["source"] == {"url": "https://example.org/${{ version }}.tar.gz", "sha256": "ab" * 32}
        assert recipe["build"]["skip"] == 'match(python, "<3.11")'
        assert recipe["requirements"]["run"] == ["python", "click >=8.1", "pytorch >=2.10"]
        assert recipe["requirements"]["host"] == ["python", "pip", "nanobind >=3.1"]

    def test_a_failing_step_sets_the_exit_status(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(release.sys, "executable", "false")
        assert release.main(["--folder", str(tmp_path / "new")]) == 1
        assert "FAILED: " in capsys.readouterr().err


class TestReleasePage:
    TEXT = (ROOT / "RELEASE.md").read_text(encoding="utf-8")

    def test_scripts_and_options_exist(self) -> None:
        scripts = re.findall(r"python (tools/\w+\.py)([^`\n]*)", self.TEXT)
        assert {script for script, _ in scripts} == {"tools/release.py", "tools/matrix.py", "tools/hub_kernel.py"}
        for script, options in scripts:
            source = (ROOT / script).read_text(encoding="utf-8")
            for option in re.findall(r"--[\w-]+", options):
                assert f'"{option}"' in source, (script, option)

    def test_wheels_are_those_that_are_declared(self) -> None:
        named = re.findall(r"`(cp\d+)-(\w+)`", self.TEXT)
        platforms = {platform for _, platform in named}
        assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64", "win_amd64"}
        builds = [build.removesuffix("-*") for build in PROJECT["tool"]["cibuildwheel"]["build"]]
        assert sorted(named) == sorted((build, platform) for build in builds for platform in platforms)
