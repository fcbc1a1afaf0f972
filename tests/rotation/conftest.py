"""A fixture of the fused step."""

from __future__ import annotations

from typing import Any

import pytest

from ropewalk.rotation import qk_norm


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record, for each call of `run_fused`, whether one kernel did all the work."""
    answers: list[bool] = []
    run = qk_norm.run_fused

    def noted(*args: Any, **how: Any) -> Any:
        done = run(*args, **how)
        answers.append(done is not None)
        return done

    monkeypatch.setattr(qk_norm, "run_fused", noted)
    return answers
