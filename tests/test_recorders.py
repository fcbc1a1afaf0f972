"""The recorders of golden numbers: some rows of class_defaults.json again, and what a changed row looks like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import record_class_defaults  # noqa: E402
import recording_configs  # noqa: E402

transformers = pytest.importorskip("transformers", "5.23")
FILE = ROOT / "tests" / "golden" / "class_defaults.json"
# The recorders follow the installed version; the committed rows are of this one.
this_version = pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="rows of transformers 5.23")
# The whole head; one kind of layer that does not rotate; the last channels, with an output order of its own.
NAMES = ["llama", "cohere2", "youtu"]


def copy_of(names: list[str], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    golden = json.loads(FILE.read_text())
    golden["rows"] = [row for row in golden["rows"] if row["model_type"] in names and "variant" not in row]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    return path, golden


@this_version
def test_rows_again_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, golden = copy_of(NAMES, tmp_path)
    assert len(golden["rows"]) == len(NAMES)
    before = path.read_bytes()
    assert record_class_defaults.main([*NAMES, "--file", str(path), "--write"]) == 0
    assert "3 same, 0 moved, 0 gone, 0 kept, 0 new" in capsys.readouterr().out
    assert path.read_bytes() == before


@this_version
def test_a_changed_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, golden = copy_of(["llama"], tmp_path)
    right = golden["rows"][0]["layers"]["0"]["inv_freq"][3]
    golden["rows"][0]["layers"]["0"]["inv_freq"][3] = right + 2**-24
    path.write_text(json.dumps(golden))
    assert record_class_defaults.main(["llama", "--file", str(path)]) == 1
    assert f"moved: llama: layers.0.inv_freq[3]: {right + 2**-24} is now {right}" in capsys.readouterr().out
    assert json.loads(path.read_text()) == golden  # comparing writes nothing
    assert record_class_defaults.main(["llama", "--file", str(path), "--write"]) == 1
    assert json.loads(path.read_text())["rows"][0]["layers"]["0"]["inv_freq"][3] == right


def test_a_new_and_a_missing_model_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama as a model that ropewalk does not know; a row of a model that transformers does not have."""
    path, golden = copy_of(["llama"], tmp_path)
    golden["rows"][0]["model_type"] = "unheard_of"
    path.write_text(json.dumps(golden))
    known = record_class_defaults.known()
    monkeypatch.setattr(record_class_defaults, "known", lambda: known - {"llama"})
    assert record_class_defaults.main(["llama", "unheard_of", "--file", str(path)]) == 1
    said = capsys.readouterr().out
    assert "new model type: llama: layer 0: half, 128 from channel 0" in said
    assert "gone: unheard_of: the installed packages do not have it" in said


def test_known_is_read_read_through_or_refused() -> None:
    assert record_class_defaults.unknown(["llama", "llava", "bert", "unheard_of"], record_class_defaults.known()) == [
        "unheard_of"
    ]
    assert "llama" in recording_configs.model_types()
