"""Test the output and the exit status of `ropewalk check`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ropewalk.programs import cli

HERE = Path(__file__).parents[1] / "conformance"
RIGHT = f"{HERE / 'right' / 'flash_attn_reference.py'}:apply_rotary_emb_torch"
WRONG = f"{HERE / 'wrong' / 'cos_and_sin_swapped.py'}:apply_rotary_pos_emb"
CAUTION = f"{HERE / 'wrong' / 'output_order.py'}:Rotary"


def run(*arguments: object) -> Result:
    apart = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(cli.main, ["check", *(str(a) for a in arguments)])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((RIGHT,), 0),
        ((WRONG,), 1),
        ((CAUTION,), 0),
        ((CAUTION, "--strict"), 1),
        (("no/such/file.py:f",), 2),
        ((RIGHT, "--config", "no/such/config.json"), 2),
        ((RIGHT, "--arg", "nothing"), 2),
        ((RIGHT, "--pairing", "interleaved"), 1),
    ],
)
def test_exit_status(arguments: tuple[str, ...], status: int) -> None:
    assert run(*arguments).exit_code == status


def test_says_first_what_runs() -> None:
    ran = run(WRONG)
    assert ran.stderr.startswith("This runs the code of ")
    assert "cos-and-sin-swapped" in ran.stdout


def test_json_alone_on_stdout() -> None:
    said = json.loads(run(WRONG, "--json").stdout)
    assert said["findings"][0]["code"] == "cos-and-sin-swapped"


def test_with_a_config(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0}))
    ran = run(f"{HERE / 'wrong' / 'rotates_backwards__in_a_module.py'}:Rotary", "--config", tmp_path / "config.json")
    assert ran.exit_code == 1
    assert "rotates-backwards" in ran.stdout


def test_arguments_are_literals_or_text(tmp_path: Path) -> None:
    source = (HERE / "right" / "module_of_one_tensor.py").read_text("utf-8")
    (tmp_path / "mine.py").write_text(
        source.replace("head_dim, theta=10000.0", "width, kind, theta=10000.0, head_dim=64")
    )
    target = f"{tmp_path / 'mine.py'}:Rope"
    assert run(target, "--arg", "width=64").exit_code == 2
    assert run(target, "--arg", "width=64", "--arg", "kind=plain").exit_code == 0
