"""The ropes of 292 published config files, or the reasons why they are refused. See golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from ropewalk import ModelRopes, RopeError, from_config

GOLDEN = Path(__file__).parents[1] / "golden" / "released.json"
ROWS = [(f"{row['file']} {row['model_type']}", row) for row in json.loads(GOLDEN.read_text())["rows"]]


def rope_facts(ropes: ModelRopes) -> list[list[Any]]:
    return [[repr(rope), len(layers)] for rope, layers in ropes.groups()]


def test_ropes() -> None:
    def check(row: dict[str, Any]) -> None:
        ropes = from_config(row["config"])
        assert rope_facts(ropes) == row["ropes"]
        if "text_only" in row:
            assert rope_facts(from_config(row["config"], text_only=True)) == row["text_only"]
        json.dumps(ropes.facts(), allow_nan=False)
        assert ropes.explain(5000)

    rows = [(name, row) for name, row in ROWS if "ropes" in row]
    assert len(rows) == 221
    each(rows, check)


def test_refusals_give_the_reason() -> None:
    def check(row: dict[str, Any]) -> None:
        with pytest.raises(RopeError) as raised:
            from_config(row["config"])
        assert row["refused"] in str(raised.value)

    each([(name, row) for name, row in ROWS if "refused" in row], check)


def test_written_configs_give_the_same_ropes() -> None:
    """Models outside transformers read only the schema of version 4."""

    def check(row: dict[str, Any]) -> None:
        ropes = from_config(row["config"])
        if ropes.file_format:  # Meta's params.json, which has another pairing
            return
        try:
            written = ropes.to_hf_config(version=4)
        except RopeError as refusal:
            assert "Pass version=5" in str(refusal) or "own code" in str(refusal)  # noqa: PT017
            return
        assert from_config(written).layers == ropes.layers

    each([(name, row) for name, row in ROWS if "ropes" in row], check)
