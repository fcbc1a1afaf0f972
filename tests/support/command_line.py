"""Run commands of `ropewalk` in this process."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner, Result

from ropewalk.tools import cli

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
