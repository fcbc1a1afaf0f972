"""`ropewalk diff`, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import command_line
from command_line import LLAMA
from ropewalk import RopeError, diff
from ropewalk.engines import ENGINES, MORE_ENGINES, TRAINERS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 0.7}
run = partial(command_line.run, "diff")


def written(folder: Path, name: str, **more: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**LLAMA, **more}))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, "config", rope_scaling=YARN)


def test_one_config(config: Path) -> None:
    ran = run(config)
    assert ran.exit_code == 1  # mlx-lm reads mscale alone
    assert ran.stdout.rstrip("\n") == diff.engines(config).text()
    assert run(config, "--verbose").stdout.rstrip("\n") == diff.engines(config).text(verbose=True)
    assert "--verbose is for one config" in run(config, config, "--verbose").stderr


def test_the_exit_status(config: Path, tmp_path: Path) -> None:
    """0: identical, 1: different or rejected, 2: not judged."""
    arcee = written(tmp_path, "arcee", model_type="arcee")
    assert run(config, "--engines", "vllm,sglang").exit_code == 0
    assert run(config, "--engines", "vllm,mlx-lm").exit_code == 1
    assert run(arcee).exit_code == 0  # mlx-lm does not have the model, and others do
    assert run(arcee, "--engines", "vllm,mlx-lm").exit_code == 2
    linear = written(tmp_path, "linear", rope_scaling={"rope_type": "linear", "factor": 4})
    assert run(linear, "--engines", "vllm").exit_code == 1  # a factor must be a float there
    assert run(config, config).exit_code == 0
    assert run(config, arcee).exit_code == 1
    assert run(tmp_path / "missing.json").exit_code == 2


@pytest.mark.parametrize("more", [(), ("--engines", "vllm"), ("itself",)])
def test_no_verdict_about_a_file_of_which_a_key_is_left_out(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Without the key all engines agree, and both configs are the same."""
    path = written(tmp_path, "twice", rope_parameters={"rope_theta": 10_000.0, "my_rope_key": 1})
    arguments = [
        path,
        *(path if word == "itself" else word for word in more),
        "--ignore",
        "rope_parameters.my_rope_key",
    ]
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert "Left out, as asked: rope_parameters.my_rope_key. All below is about the config without it" in ran.stdout
    assert ran.stdout.index("Left out") < ran.stdout.index("tokens")
    facts = json.loads(run(*arguments, "--json").stdout)
    assert facts["ignored"] == ["rope_parameters.my_rope_key"]
    assert facts.get("verdict") in (None, "not judged")
    assert facts.get("same") is None


def test_a_list_of_engines_with_commas(config: Path) -> None:
    said = run(config, "--engines", "vllm, SGLang", "--engines", "mlx-lm", "--json").stdout
    assert [entry["name"] for entry in json.loads(said)["engines"]] == ["vLLM", "SGLang", "mlx-lm"]
    assert run(config, "--engines", "vllm,nothing").exit_code == 2
    assert "a name is missing before or after a comma" in run(config, "--engines", "vllm,").stderr


def test_the_factor_of_a_params_json(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"dim": 64, "n_heads": 2, "n_layers": 1, "rope_theta": 5e5, "use_scaled_rope": True}))
    assert run(path).exit_code == 2
    assert run(path, "--factor", 8).exit_code == 0
    assert run(path, path, "--factor", 32).exit_code == 0


def test_trainers_are_compared_if_they_are_asked_for(config: Path) -> None:
    names = [engine.name for engine in (*ENGINES.values(), *TRAINERS.values())]
    assert [entry["name"] for entry in json.loads(run(config, "--trainers", "--json").stdout)["engines"]] == names
    named = json.loads(run(config, "--trainers", "--engines", "vllm", "--json").stdout)["engines"]
    assert [entry["name"] for entry in named] == ["vLLM", *names[len(ENGINES) :]]


def test_the_help_lists_the_engines_and_the_exit_status() -> None:
    text = " ".join(run("--help").stdout.split())
    assert all(name in text for name in {**ENGINES, **MORE_ENGINES, **TRAINERS})
    assert "The exit status is 0 if" in text


def test_one_config_as_json(config: Path) -> None:
    ran = run(config, "--json", "--length", 4096, "--engines", "vllm,mlx-lm")
    assert json.loads(ran.stdout) == diff.engines(config, length=4096, names=("vllm", "mlx-lm")).facts


def test_an_override(config: Path) -> None:
    keys = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    ran = run(config, "--override", json.dumps(keys), "--engines", "transformers,vllm")
    assert (ran.exit_code, ran.stdout.rstrip("\n")) == (
        0,
        diff.engines(config, names=("transformers", "vllm"), override=keys).text(),
    )
    assert "Each engine is started with the override" in ran.stdout
    assert ": yarn in the file" in ran.stdout  # and linear in the engines
    for value in ("rope_theta=1", "[1]", "[]", "null"):
        ran = run(config, "--override", value)
        assert (ran.exit_code, "must be a JSON object" in ran.stderr) == (2, True)
    ran = run(config, "--override", '{"text_config": {"rope_scaling": "yarn"}}')
    assert (ran.exit_code, "rope_scaling in an override must be an object, got 'yarn'" in ran.stderr) == (2, True)
    ran = run(config, "--override", '{"rope_theta": 5.0}', "--engines", "vllm,sglang")
    assert "It does not change the ropes of vLLM and SGLang." in " ".join(ran.stdout.split())
    with pytest.raises(RopeError, match="override must have at least one key"):
        diff.engines(config, override={})
    assert "--override is for one config" in run(config, config, "--override", json.dumps(keys)).stderr


def test_two_configs(config: Path, tmp_path: Path) -> None:
    other = written(tmp_path, "other", rope_theta=20_000.0, rope_scaling=YARN)
    ran = run(config, other, "--length", 100)
    assert ran.exit_code == 1
    assert ran.stdout.rstrip("\n") == diff.configs(config, other, length=100).text()
    assert json.loads(run(config, other, "--json").stdout) == diff.configs(config, other).facts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engines", "tgi"), "--engines must be one of 'transformers', 'vllm', 'sglang', 'llama.cpp'"),
        (("--ignore", "nothing"), "every key in --ignore must be in the config"),
    ],
)
def test_errors_are_one_line(config: Path, arguments: tuple[str, ...], message: str) -> None:
    ran = run(config, *arguments)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_what_cannot_be_combined(config: Path) -> None:
    ran = run(config, config, "--engines", "vllm")
    assert ran.exit_code == 2
    assert "--engines is for one config, so it cannot be combined with SOURCE2" in ran.stderr


def test_a_model_that_ropewalk_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, "mine", model_type="mine", rope_theta=None)
    assert "model_type" in run(path).stderr
    ran = run(path, "--pairing", "half", "--base", 1e4)
    assert ran.exit_code == 2
    assert "were not judged" in ran.stdout
    assert "vLLM 0.33.0 (not judged) " in ran.stdout
    assert "    vLLM (not judged): equal up to" in ran.stdout


def test_an_engine_that_runs_no_rope_has_no_row_of_roundings(tmp_path: Path) -> None:
    path = written(tmp_path, "dynamic", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    said, _, rounding = run(path, "--engines", "exllamav3", "--verbose").stdout.partition("how the engines round")
    assert "exllamav3 1.6.5 does not run it" in said
    assert "exllamav3" not in rounding


def test_a_single_engine_is_compared_with_transformers(config: Path, tmp_path: Path) -> None:
    """mlx-lm reads the mscale of this config in another way, so that it runs the config is not all to be said."""
    assert "mlx-lm differs from transformers." in run(config, "--engines", "mlx-lm").stdout
    assert run(config, "--engines", "mlx-lm").exit_code == 1
    only = run(written(tmp_path, "bailing", model_type="bailing_moe"), "--engines", "vllm")
    assert "vLLM runs this config. transformers has no model bailing_moe." in only.stdout
    assert only.exit_code == 2
    assert "\n\ntransformers runs this config." in run(config, "--engines", "transformers").stdout


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"model_type": "llava", "text_config": [1, 2]}')
    assert run(path).stderr.startswith(f"Error: {path}: text_config must be an object")


def test_starts_without_torch(config: Path) -> None:
    program = (
        "import sys; from click.testing import CliRunner; from ropewalk.tools.cli import main\n"
        f"assert CliRunner().invoke(main, ['diff', {str(config)!r}]).exit_code == 1\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_the_commands_of_the_page(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every command of docs/diff.md, with these files in place of those that it names."""
    page = (Path(__file__).parents[2] / "docs" / "diff.md").read_text()
    commands = [
        line.partition(" | ")[0].split()[3:] for line in page.splitlines() if line.startswith("$ ropewalk diff ")
    ]
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    files = {
        "examples/qwen2-yarn.json": config,
        "path/to/config.json": config,
        "path/to/base": config,
        "path/to/fine-tune": written(tmp_path, "tuned"),
    }
    for command in commands:
        ran = run(*(files.get(word, word) for word in command))
        assert ran.exit_code in (0, 1), ran.output
