"""Test the recorders of golden numbers: record some rows of each file again, and report changed rows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import record_golden  # noqa: E402
from recording import class_defaults, configs, files, left_out, parts  # noqa: E402
from recording.model import Recorder  # noqa: E402

transformers = pytest.importorskip("transformers", "5.23")
FOLDER = ROOT / "tests" / "golden"
# The recorders follow the installed version; the committed rows are of this one.
VERSION = json.loads((FOLDER / "class_defaults.json").read_text())["peer"]["version"].rpartition(".")[0]
this_version = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{VERSION}."), reason=f"rows of transformers {VERSION}"
)
# The whole head; one kind of layer that does not rotate; the last channels, with an output order of its own; sines of a
# table; a model that needs more than tokens, of which the attention runs alone; layers that return two things; queries
# from experts, and from a mean of two projections; two axes, and three.
NAMES = ["llama", "cohere2", "youtu", "gptj", "mimi_encoder", "bamba", "jetmoe", "zaya", "neomme", "qwen3_vl_text"]
# One attention factor; a latent, an indexer, and outputs in another order; a query scale that depends on the position;
# frequencies that depend on the length; three axes; a fused projection; a scale inside of the product.
ROWS = {
    "text_models": [
        "yarn-mistral-7b-128k",
        "deepseek-v3.2",
        "devstral-small-2-24b",
        "phi-3.5-mini-instruct",
        "qwen2-vl-72b-instruct-gptq-int4",
        "default-codegen",
        "default-gpt_neox_japanese",
    ],
    "models": ["llama-3.1-8b"],
    "schemes": ["gemma-3-27b-it", "default-moonshine"],
    "vision_towers": ["qwen2_vl_vision", "minimax_m3_vl_vision", "gemma4_vision", "llama4_vision_model", "dinov3_vit"],
    "lengths": ["phi-3.5-mini-instruct", "grag-llama-3.1-8b-cpt-dynamic"],
}


def copy_of(names: list[str], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    golden = json.loads((FOLDER / "class_defaults.json").read_text())
    golden["rows"] = [row for row in golden["rows"] if row["model_type"] in names and "variant" not in row]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    return path, golden


@this_version
def test_rows_again_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, golden = copy_of(NAMES, tmp_path)
    assert len(golden["rows"]) == len(NAMES)
    before = path.read_bytes()
    assert record_golden.main(["class_defaults", *NAMES, "--path", str(path), "--write"]) == 0
    assert f"{len(NAMES)} same, 0 moved, 0 gone, 0 kept, 0 new" in capsys.readouterr().out
    assert path.read_bytes() == before


@this_version
def test_nothing_is_left_on_the_meta_device() -> None:
    """PyTorch multiplies a tensor by a meta tensor without an error. The product is uninitialized memory."""
    [cls, *_] = parts.model_classes(configs.config_of("jetmoe"))
    model = Recorder(configs.config_of("jetmoe"), cls).model
    assert [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta] == []


@this_version
@pytest.mark.parametrize("file", ROWS)
def test_rows_of_the_other_files_bit_for_bit(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_golden.main([file, *ROWS[file]]) == 0
    said = capsys.readouterr().out
    assert ", 0 moved, 0 gone, 0 kept, 0 new" in said
    assert f"transformers {VERSION}." in said
    assert int(said.split(": ")[1].split()[0]) >= len(ROWS[file])


@this_version
def test_a_row_that_is_not_recorded_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, golden = copy_of(["llama"], tmp_path)
    path.write_text(json.dumps({**golden, "rows": [{**golden["rows"][0], "model_type": "neucodec"}]}))
    assert record_golden.main(["class_defaults", "neucodec", "--path", str(path)]) == 0
    said = capsys.readouterr().out
    assert "neucodec: NeuCodecDecoder: it rotates by the index of the head instead of the position" in said
    assert "0 same, 0 moved, 0 gone, 1 kept, 0 new" in said


@this_version
def test_a_changed_number_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, golden = copy_of(["llama"], tmp_path)
    right = golden["rows"][0]["layers"]["0"]["inv_freq"][3]
    golden["rows"][0]["layers"]["0"]["inv_freq"][3] = right + 2**-24
    path.write_text(json.dumps(golden))
    assert record_golden.main(["class_defaults", "llama", "--path", str(path)]) == 1
    assert f"moved: llama: layers.0.inv_freq[3]: {right + 2**-24} is now {right}" in capsys.readouterr().out
    assert json.loads(path.read_text()) == golden  # comparing writes nothing
    assert record_golden.main(["class_defaults", "llama", "--path", str(path), "--write"]) == 1
    assert json.loads(path.read_text())["rows"][0]["layers"]["0"]["inv_freq"][3] == right


@this_version
def test_a_changed_file_of_a_folder_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rotated channel changes, and the other file stays byte for byte."""
    names = ["llama-3.1-8b.json", "mistral-7b-instruct-v0.3.json"]
    before = [(FOLDER / "models" / name).read_bytes() for name in names]
    wrong = json.loads(before[0])
    wrong["case"]["q_rot"][5] += 2**-20
    (tmp_path / names[0]).write_text(json.dumps(wrong))
    (tmp_path / names[1]).write_bytes(before[1])
    assert record_golden.main(["models", "llama-3.1-8b", "--path", str(tmp_path), "--write"]) == 1
    assert "moved: llama-3.1-8b: case.q_rot[5]: " in capsys.readouterr().out
    assert [(tmp_path / name).read_bytes() for name in names] == before


@this_version
def test_a_published_config_is_compared_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare it as committed, with another base, with one layer less, and for a row that is not of transformers."""
    golden = json.loads((FOLDER / "released.json").read_text())
    row = next(row for row in golden["rows"] if row["file"] == "005.json")  # gpt_neox: 16 of 64 channels
    by_hand = next(row for row in golden["rows"] if row.get("recorded", "").startswith("by modeling_chatglm"))
    (text, count), path = row["ropes"][0], tmp_path / "released.json"
    for ropes, moved in (
        ([[text, count]], 0),
        ([[text.replace("base=10000.0", "base=10001.0"), count]], 1),
        ([[text, count - 1]], 1),
        ([[text, count + 1]], 1),
    ):
        path.write_text(before := json.dumps({"rows": [{**row, "ropes": ropes}, by_hand]}))
        assert record_golden.main(["released", "--path", str(path), "--write"]) == moved
        assert path.read_text() == before  # it is compared only
        said = capsys.readouterr().out
        assert f"{1 - moved} same, {moved} moved, 0 gone, 1 kept" in said
        assert "by modeling_chatglm.py" in said
        assert ("is now layer 0: half, 16 from channel 0" in said) == bool(moved)


def test_code_without_a_package_needs_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_golden.main(["rules_of_llama_cpp", "default", "--source", str(tmp_path)]) == 0
    assert "default: pass a clone of llama.cpp, or the copy in llama-cpp-python's source" in capsys.readouterr().out


ENGINES = [f"rules_of_{name}" for name in ("transformers", "vllm", "sglang", "mlx_lm", "exllamav3")]
TRAINERS = [f"models_of_{name}" for name in ("torchtitan", "maxtext")]


@pytest.mark.parametrize("name", ["rotary_embedding_torch", "mlx", "torchtitan", *ENGINES, *TRAINERS])
def test_rows_of_a_package_bit_for_bit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    golden = record_golden.GOLDEN[name]
    if files.installed(golden.package) != json.loads((FOLDER / golden.path).read_text())["peer"]["version"]:
        pytest.skip(f"{golden.package} of the committed version is not installed")
    assert record_golden.main([name]) == 0
    assert ", 0 moved, 0 gone, 0 kept, 0 new" in capsys.readouterr().out


@this_version
def test_roundings_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["llama", "cohere", "olmo2", "llama4_text"]
    assert record_golden.main(["rounding_of_transformers", *names]) == 0
    assert "4 same, 0 moved" in capsys.readouterr().out


def test_a_zero_of_the_other_sign_is_a_difference() -> None:
    assert files.differences({"q": [0.0, 1.0]}, {"q": [-0.0, 1.0]}) == ["q[0]: 0.0 is now -0.0"]
    assert files.differences({"q": [0.0, -0.0]}, {"q": [0.0, -0.0]}) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["class_defaults", "llama", "nosuchmodel", "bert"], "class_defaults.json has no row nosuchmodel, bert"),
        (["models", "nosuchmodel"], "models has no row nosuchmodel"),
    ],
)
def test_an_unknown_name_is_an_error(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        record_golden.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""  # before anything is recorded


@this_version
def test_the_version_is_written_where_nothing_moved(tmp_path: Path) -> None:
    golden = json.loads((FOLDER / "text_models.json").read_text())
    rows = [row for row in golden["rows"] if row["name"] == "default-codegen"]
    path = tmp_path / "text_models.json"
    files.dump(path, {**golden, "peer": {**golden["peer"], "version": "5.0.0"}, "rows": rows})
    assert record_golden.main(["text_models", "--path", str(path), "--write"]) == 0
    assert json.loads(path.read_text()) == {
        **golden,
        "peer": {**golden["peer"], "version": transformers.__version__},
        "rows": rows,
    }


def test_a_new_and_a_missing_model_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama is treated as unknown to ropewalk, and a row is added for a model that transformers lacks."""
    path, golden = copy_of(["llama"], tmp_path)
    golden["rows"][0]["model_type"] = "unheard_of"
    path.write_text(json.dumps(golden))
    known = class_defaults.known_types()
    monkeypatch.setattr(class_defaults, "known_types", lambda: known - {"llama"})
    assert record_golden.main(["class_defaults", "llama", "unheard_of", "--path", str(path)]) == 1
    said = capsys.readouterr().out
    assert "new model type: llama: layer 0: half, 128 from channel 0" in said
    assert "gone: unheard_of: the installed packages do not have it" in said


def test_known_model_types() -> None:
    known = class_defaults.known_types()
    assert class_defaults.unknown(["llama", "llava", "bert", "unheard_of"], known) == ["unheard_of"]
    assert "llama" in configs.model_types()


@this_version
def test_what_is_left_out_is_installed_and_not_known() -> None:
    assert left_out.LEFT_OUT.issubset(configs.model_types())
    assert not left_out.LEFT_OUT & class_defaults.known_types()


@this_version
def test_every_config_with_keys_of_a_rope_is_known() -> None:
    """A model without rows would be read by its text model alone, or refused as unknown."""
    known = class_defaults.known_types() | {"nougat"}  # transformers cannot build Nougat's config
    unknown = [c for name in configs.model_types() if name not in known for c in [configs.config_of(name)]]
    with_rope = {c.model_type for c in unknown if re.search(r'"[a-z_]*(rope|rotary)', c.to_json_string(False))}
    assert with_rope <= known


def test_every_golden_file_has_a_recorder_or_a_reason() -> None:
    """The README lists each file without a recorder, with the reason."""
    recorded = {golden.path for golden in record_golden.GOLDEN.values()}
    said = (FOLDER / "README.md").read_text().partition("## Recording again")[2]
    folders = ("peers", "engines", "engine_rules")
    inside = [path for folder in folders for path in (FOLDER / folder).glob("*.json")]
    for path in [*FOLDER.glob("*.json"), FOLDER / "models", *inside]:
        name = str(path.relative_to(FOLDER))
        assert f"`{name}`" in said or f"`{name}/`" in said, name
        assert name in recorded or f"`{name}`: no recorder" in said, name
