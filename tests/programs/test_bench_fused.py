"""Test the benchmark of the fused step: every contender is checked before it is timed."""

from __future__ import annotations

import pytest
import torch

import ropewalk
from ropewalk.tools.bench import fused


def test_rows() -> None:
    rows = fused.rows((1, 3), (torch.float32, torch.bfloat16), rounds=1, seconds=0)
    assert {(row["batch"], row["dtype"]) for row in rows} == {(b, d) for b in (1, 3) for d in ("float32", "bfloat16")}
    assert {row["state"] for row in rows} == {"timed"}
    assert {row["contender"] for row in rows} == {"separate calls", "one call", "one call, pages", "copies"}
    assert all(row["median"] >= row["least"] > 0 for row in rows)
    assert {row["of_separate"] for row in rows if row["contender"] == "separate calls"} == {1.0}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ropewalk.rotate_and_store

    def wrong(*args: torch.Tensor, **how: object) -> torch.Tensor:
        return right(*args, **how) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(ropewalk, "rotate_and_store", wrong, raising=False)
    states = {row["contender"]: row["state"] for row in fused.rows((1,), (torch.float32,), rounds=1, seconds=0)}
    assert states == {"separate calls": "timed", "one call": "wrong", "one call, pages": "wrong", "copies": "timed"}
