"""Run the checks of `worker.py` with 4 processes, with gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import processes

WORKER = Path(__file__).parent / "worker.py"
FILES = ("dtensor_checks.py", "module_checks.py", "tensor_parallel_checks.py")


def names() -> list[str]:
    """Read the names of the checks from the files, because importing them would load torch.distributed.tensor here."""
    lines = [line for file in FILES for line in (WORKER.parent / file).read_text().splitlines()]
    return [lines[i + 1].removeprefix("def ").split("(")[0] for i, line in enumerate(lines) if line == "@check"]


@pytest.fixture(scope="module", params=[4], ids=lambda world: f"{world} processes")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """Return, for each process, a dict from the name of a check to its error or None."""
    said = [output for _, output in processes.run(WORKER, request.param, tmp_path_factory.mktemp("group"))]
    ends = [f"the process ended after:\n{output[-4000:]}" for output in said]
    told = [dict(json.loads(line) for line in output.splitlines() if line.startswith('["')) for output in said]
    return [{name: of_rank.get(name, end) for name in names()} for of_rank, end in zip(told, ends, strict=True)]


@pytest.mark.parametrize("name", names())
def test_check(outcomes: list[dict[str, str | None]], name: str) -> None:
    failures = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(outcomes) if of_rank[name] is not None]
    assert not failures, "\n".join(failures)


def test_there_are_checks() -> None:
    assert len(names()) > 15
