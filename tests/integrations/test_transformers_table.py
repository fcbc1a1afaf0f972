"""Measure every model and tower of the tables in docs/transformers-models.md, and compare the page with the results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from model_checks import NEAR, measure
from tiny_models import MODELS
from tiny_towers import TOWERS
from tower_checks import measure as measure_tower

pytest.importorskip("transformers", "5.23")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformers-models.md"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_table", ROOT / "tools" / "transformers_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of_the_page(*, towers: bool = False) -> dict[str, list[str]]:
    text = PAGE.read_text("utf-8").partition(tool().TOWERS_AT)[2 if towers else 0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    row = measure(name)
    assert row.seen > 1e-3  # a rotation that was left out would show
    assert row.near <= NEAR
    assert row.far_equal
    assert row.theirs_equal
    assert row.gradient <= 2 * NEAR
    assert row.greedy is not False
    assert row.undone
    fixed = tool().fixed_cells(row)
    page = rows_of_the_page()[name]
    assert all(page[column] == text for column, text in fixed.items())


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_tower(name: str) -> None:
    row = measure_tower(name)
    assert row.seen > 0.1  # a rotation that was left out would show
    assert row.near <= NEAR
    assert row.gradient <= 2 * NEAR
    assert row.theirs_equal is not False
    assert row.undone
    made, page = tool().tower_cells(row), rows_of_the_page(towers=True)[name]
    assert all(page[column] == made[column] for column in (0, 1, 2, 4, 6))


def test_the_page_has_every_model_and_no_other() -> None:
    rows = rows_of_the_page()
    assert list(rows) == list(MODELS)
    assert len({name.partition(":")[0] for name in rows}) >= 60
    assert not any("no" in cells[3:] for cells in rows.values())
    towers = rows_of_the_page(towers=True)
    assert list(towers) == sorted(TOWERS)
    assert not any("no" in cells[3:] for cells in towers.values())


def test_the_page_is_what_the_tool_writes() -> None:
    table = tool()
    text = PAGE.read_text("utf-8")
    assert text.startswith(table.head(len({name.partition(":")[0] for name in MODELS})))
    assert table.towers_head(len(TOWERS)) in text
