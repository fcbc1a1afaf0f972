"""Run commands of `ropewalk` in this process."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ropewalk import RopeError, conformance
from ropewalk.tools import cli
from ropewalk.tools.commands import check

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
}


def run(*arguments: object) -> Result:
    # Before click 8.2 stderr is a part of stdout unless it is asked for.
    apart = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(cli.main, [str(a) for a in arguments])


def check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ropewalk check` call the target in this process, because another one takes seconds to start."""

    def answered(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            report = conformance.check(asked["target"], **asked["arguments"])
        except RopeError as e:
            return {"error": str(e)}
        return {"facts": report.to_dict(), "text": str(report)}

    monkeypatch.setattr(check, "_run", answered)
