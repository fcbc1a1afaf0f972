"""The command line, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import ropewalk
from ropewalk import cli

CONFIG = Path(__file__).parent / "golden" / "models" / "llama-3.1-8b.json"
PNG = b"\x89PNG"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text())["config"]))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def test_explain(config: Path) -> None:
    ran = run("explain", config)
    assert ran.exit_code == 0
    assert ran.stdout.rstrip("\n") == ropewalk.from_config(config).explain()
    assert run("explain", config.parent).stdout == ran.stdout


def test_explain_at_a_length(config: Path) -> None:
    assert "at length         80,000 tokens" in run("explain", config, "--length", 80_000).stdout


def test_explain_as_json(config: Path) -> None:
    ran = run("explain", config, "--json", "--length", 5)
    assert json.loads(ran.stdout) == ropewalk.from_config(config).facts(5)


def test_explain_draws(config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "frequencies.png"
    ran = run("explain", config, "--json", "--plot", picture)
    assert ran.exit_code == 0
    assert picture.read_bytes().startswith(PNG)
    assert json.loads(ran.stdout)["model_type"] == "llama"  # what was drawn is said on stderr
    assert "frequencies.png" in ran.stderr


def test_explain_of_an_unknown_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mine", "head_dim": 8, "num_hidden_layers": 1}))
    refused = run("explain", path)
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith(f"Error: {path}: model_type: it must be one that ropewalk knows")
    assert refused.stderr.count("\n") == 1
    ran = run("explain", path, "--pairing", "interleaved", "--base", 1e4)
    assert ran.exit_code == 0
    assert "passed by the caller" in ran.stdout


def test_explain_of_nothing(tmp_path: Path) -> None:
    refused = run("explain", tmp_path / "nowhere")
    assert refused.exit_code == 1
    assert "the config must be a file" in refused.stderr


@pytest.mark.parametrize("arguments", [("explain",), ("explain", "x", "--length", "0"), ("unravel",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_doctor() -> None:
    ran = run("doctor")
    assert ran.exit_code == 0
    assert f"ropewalk    {ropewalk.__version__}" in ran.stdout
    assert "reference   usable on every device" in ran.stdout
    assert "cpu kernel  not usable: this release has none" in ran.stdout


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = run("doctor")
    assert ran.exit_code == 0
    assert "not usable: torch cannot be imported" in ran.stdout


def test_doctor_says_what_is_not_installed() -> None:
    assert cli._version("no-such-package-of-ours") == "not installed"


def test_demo_hands_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ropewalk.demo

    asked: list[Path] = []
    monkeypatch.setattr(ropewalk.demo, "run", lambda folder, say: (asked.append(folder), say("done")))
    ran = run("demo", "--folder", tmp_path)
    assert (ran.stdout, asked) == ("done\n", [tmp_path])


@pytest.mark.parametrize("command", [["-m", "ropewalk"], ["-c", "from ropewalk.cli import main; main()"]])
def test_as_a_process(command: list[str], config: Path) -> None:
    ran = subprocess.run([sys.executable, *command, "explain", str(config)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "llama3: factor 8.0" in ran.stdout


def test_version() -> None:
    assert run("--version").stdout == f"ropewalk, version {ropewalk.__version__}\n"
