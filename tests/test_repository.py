"""Workflows, hooks, forms and metadata for a public host agree with CI and with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import slow_tests
from ropewalk.configs import source, weights
from ropewalk.configs.gguf import header
from ropewalk.tools.convert import layouts, pth

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]
CI = (ROOT / ".ci" / "run").read_text()


def parsed(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


class TestWorkflow:
    jobs = parsed(".github/workflows/ci.yml")["jobs"]

    def test_the_checks_are_those_of_ci(self) -> None:
        assert commands(self.jobs["all-checks"]) == [".ci/run $ALL"]

    def test_the_tests_are_run_by_the_command_of_the_readme(self) -> None:
        assert commands(self.jobs["tests"]) == re.findall(
            r"^pip install .*pytest.*$", (ROOT / "README.md").read_text(), re.M
        )

    def test_every_python_that_is_claimed_is_tested(self) -> None:
        claimed = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
        assert claimed <= set(self.jobs["tests"]["strategy"]["matrix"]["python"])

    def test_the_oldest_versions_are_those_that_are_allowed(self) -> None:
        rows = self.jobs["versions"]["strategy"]["matrix"]["include"]
        (oldest,) = (need.removeprefix("torch>=") for need in PROJECT["dependencies"] if need.startswith("torch>="))
        assert {
            "python": PROJECT["requires-python"][2:],
            "torch": f"torch=={oldest}.*",
            "resolution": "highest",
        } in rows
        assert "lowest-direct" in {row["resolution"] for row in rows}


def test_the_documentation_is_built_by_the_same_commands_in_ci_and_by_hand() -> None:
    """The first command deletes the page that the second one writes."""
    steps = r"zensical\"? (build --strict --clean)\s+(?:&& )?(python tools/explorer_for_docs\.py)$"
    by_hand, in_ci = ((ROOT / name).read_text() for name in ("CONTRIBUTING.md", ".ci/run"))
    assert re.findall(steps, by_hand, re.M) == re.findall(steps, in_ci, re.M) != []


def test_the_release_builds_wheels_where_the_release_page_says() -> None:
    jobs = parsed(".github/workflows/release.yml")["jobs"]
    machines = jobs["wheels"]["strategy"]["matrix"]["os"]
    assert machines == TestWorkflow.jobs["tests"]["strategy"]["matrix"]["os"]
    rows = re.findall(r"^\| (\w+ [\w-]+) \| `cp311", (ROOT / "RELEASE.md").read_text(), re.M)
    assert rows == ["Linux x86-64", "Linux aarch64", "macOS arm64", "Windows x86-64"]
    assert len(machines) == len(rows)
    assert any("cibuildwheel" in command for command in commands(jobs["wheels"]))


def test_wheels_are_those_that_the_release_page_names() -> None:
    named = re.findall(r"`(cp\d+)-(\w+)`", (ROOT / "RELEASE.md").read_text())
    platforms = {platform for _, platform in named}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64", "win_amd64"}
    builds = [build.removesuffix("-*") for build in TOOL["cibuildwheel"]["build"]]
    assert sorted(named) == sorted((build, platform) for build in builds for platform in platforms)
    assert builds == ["cp311", TOOL["scikit-build"]["wheel"]["py-api"]]  # the oldest Python, and all others


def test_the_sdist_holds_what_installs_and_no_more() -> None:
    declared = {entry.strip("/") for entry in TOOL["scikit-build"]["sdist"]["include"]}
    assert declared == {"src", "csrc", "CMakeLists.txt", "pyproject.toml", "CHANGELOG.md", "LICENSE", "README.md"}


def test_the_recipe_for_conda_requires_what_pyproject_declares() -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "RELEASE.md").read_text(), re.S)
    assert block is not None
    recipe = yaml.safe_load(block[1])
    pip = [re.sub("^pytorch(?= )", "torch", need).replace(" ", "") for need in recipe["requirements"]["run"]]
    assert pip == ["python", *PROJECT["dependencies"]]
    host = [need.replace(" ", "") for need in recipe["requirements"]["host"]]
    assert host == ["python", "pip", *PYPROJECT["build-system"]["requires"]]
    assert f'"<{PROJECT["requires-python"].removeprefix(">=")}"' in recipe["build"]["skip"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]


def test_hooks_run_what_ci_runs() -> None:
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]:
        assert re.search(rf"^ *{re.escape(hook['entry'])}\b", CI, re.M), hook["entry"]


def test_pytest_alone_leaves_out_the_slow_tests() -> None:
    file = "tests/configs/test_source.py"
    collected = {}
    for how, arguments in {"alone": ["-o", f"testpaths={file}"], "with paths": [file]}.items():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        collected[how] = {line.partition("[")[0] for line in output.splitlines() if "::" in line}
    assert collected["alone"]
    slow = f"{file}::test_files_are_read_or_refused_at_bounded_cost"
    assert collected["with paths"] - collected["alone"] == {slow}


def test_a_change_runs_the_slow_tests_of_what_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [test for tests in slow_tests.SLOW.values() for test in tests]
    for changed, run in (
        ([], []),
        (["src/ropewalk/kernels_of_others.py", "tests/gpu.py"], []),
        (["src/ropewalk/tools/plots/figures.py"], ["test_explorer_browser.py"]),
        (["tests/gpu/test_step.py"], ["gpu/"]),
        (["docs/start.md", "tests/checkpoints/test_killed.py"], ["checkpoints/test_killed.py", "test_docs.py"]),
    ):
        monkeypatch.setattr(slow_tests, "changed_since", lambda _, changed=changed: changed)
        assert sorted(set(every) - set(slow_tests.left_out("HEAD"))) == run, changed
    watched = {path for paths in slow_tests.SLOW for path in paths.split()}
    assert [path for path in watched if not (ROOT / path).exists()] == []


def test_the_bounds_of_the_security_page_are_those_of_the_code() -> None:
    rows = {line.split("|")[1].strip(): line for line in (ROOT / "SECURITY.md").read_text().splitlines() if "|" in line}
    config, gguf = rows["`config.json`, `params.json`, `adapter_config.json`"], rows["GGUF header"]
    assert f"{source._MAX_BYTES // 2**20} MiB, 2¹⁸ values, nested at most {source._MAX_DEPTH} deep" in config
    assert source._MAX_VALUES == 2**18
    assert (
        f"{header._MAX_BYTES // 2**20} MiB of header, {header._MAX_KEYS:,} keys, {header._MAX_TENSORS:,} tensors"
        in gguf
    )
    assert "2²¹ array items, no nesting" in gguf
    assert header._MAX_ITEMS == 2**21
    index, header_bytes = f"{weights._MAX_INDEX_BYTES // 2**20} MiB of index", weights._MAX_HEADER_BYTES // 2**20
    safetensors = f"{header_bytes} MiB of header, {index}, and in `convert` {layouts.MAX_NAME:,} characters in a name"
    assert safetensors in rows["safetensors"]
    pickles = f"At most {pth._LARGEST_READ // 2**20} MiB of pickle and 1 MiB of archive directory"
    assert pickles in rows["`consolidated.*.pth`"]
