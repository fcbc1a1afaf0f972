"""For any random change of a real config, `from_config` returns `ModelRopes` or raises a `RopeError`."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_mutations import CONFIGS, outcome


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@settings(max_examples=1500)
@given(seed=st.integers(0, 2**32))
def test_only_ropes_or_rope_errors(folder: Path, seed: int) -> None:
    outcome(random.Random(seed), CONFIGS, folder)


def test_each_outcome_occurs(folder: Path) -> None:
    counted = Counter(outcome(random.Random(seed), CONFIGS, folder) for seed in range(300))
    assert min(counted["refused"], counted["read and rewritten"]) > 30, counted
    assert counted["read, rewriting refused"] > 0, counted
