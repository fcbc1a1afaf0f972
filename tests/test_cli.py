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
    assert "cpu kernel  usable: " in ran.stdout or "cpu kernel  not usable: not built" in ran.stdout


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


def write(tmp_path: Path, **values: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "rope_theta": 1e4, **values})
    )
    return path


def test_explain_draws_what_depends_on_the_length(tmp_path: Path) -> None:
    path = write(tmp_path, max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2.0})
    refused = run("explain", path, "--plot", tmp_path / "a.png")
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert "Pass --length N too." in refused.stderr
    assert run("explain", path, "--length", 128, "--plot", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_explain_draws_each_rope_of_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="gemma3_text", rope_local_base_freq=1e4, sliding_window_pattern=2, rope_theta=1e6)
    ran = run("explain", path, "--plot", tmp_path / "a.png")
    assert ran.exit_code == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {"a-1.png", "a-2.png"}
    nothing = run("explain", write(tmp_path, model_type="jamba"), "--plot", tmp_path / "b.png")
    assert nothing.exit_code == 1
    assert "no layer rotates" in nothing.stderr


def test_explain_of_params_json(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(
        json.dumps({"dim": 4096, "n_layers": 32, "n_heads": 32, "rope_theta": 5e5, "use_scaled_rope": True})
    )
    assert "Pass factor=8.0" in run("explain", path).stderr
    assert "llama3: factor 8.0" in run("explain", path, "--factor", 8).stdout


def test_explain_text_only(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="qwen2_vl_text", head_dim=None, hidden_size=64, num_attention_heads=4)
    assert "text_only=True" in run("explain", path).stderr
    assert "text only" in run("explain", path, "--text-only").stdout


def test_a_full_disk_is_no_traceback(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.click, "echo", full)
    ran = run("explain", config)
    assert ran.exit_code == 1
    assert isinstance(ran.exception, (SystemExit, OSError))
