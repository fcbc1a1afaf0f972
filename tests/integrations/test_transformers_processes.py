"""Test models in a new process, which compiles them or loads them from a pickle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from model_checks import FAR, NEAR, output, tokens
from ropewalk.integrations.transformers import accelerate, restore

pytest.importorskip("transformers", "5.23")
WORKER = Path(__file__).parent / "compile_worker.py"


def worker(*arguments: str) -> Any:
    ran = subprocess.run([sys.executable, str(WORKER), *arguments], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_compiled_without_a_graph_break() -> None:
    found = worker("dynamo", *tiny_models.COMPILED)
    assert list(found) == list(tiny_models.COMPILED)
    assert max(found.values()) <= NEAR


@pytest.mark.usefixtures("compiler")
def test_through_inductor() -> None:
    found = worker("inductor", "llama")
    assert found["near"] <= NEAR
    assert found["far"] <= NEAR
    assert found["gradient"] <= 2 * NEAR


def test_a_pickle_in_a_fresh_process(tmp_path: Path) -> None:
    model, ids = tiny_models.build("llama"), tokens(2, 16)
    with torch.no_grad():
        plain = output(model, ids, FAR)
        accelerate(model)
        exact = output(model, ids, FAR)
    torch.save((model, ids, exact, plain), tmp_path / "model.pt")
    restore(model)
    assert worker("pickled", str(tmp_path / "model.pt")) == [True, True]
