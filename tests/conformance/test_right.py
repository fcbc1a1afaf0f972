"""`check` has no findings for correct code: the usual forms, and other libraries if they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import RoFormerConfig

from code_of_transformers import code_of
from ropewalk import Rope, RopeError, RotaryEmbedding, conformance

FILES = sorted((Path(__file__).parent / "right").glob("*.py"))

FAMILIES = [
    *("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "glm", "cohere", "deepseek_v3", "olmo2", "stablelm"),
    *("falcon", "granite", "smollm3", "persimmon", "deepseek_v32", "longcat_flash", "olmo3"),
    *("gemma3_text, layer 0", "gemma3_text, layer 5", "modernbert, layer 0", "modernbert, layer 1"),
]
LIBRARIES = {
    "x_transformers": (
        "x_transformers.x_transformers:RotaryEmbedding,apply_rotary_pos_emb",
        {"pairing": "interleaved"},
    ),
    "timm": ("timm.layers.pos_embed_sincos:apply_rot_embed", {"pairing": "interleaved"}),
    "timm, sin and cos in one": ("timm.layers.pos_embed_sincos:apply_rot_embed_cat", {"pairing": "interleaved"}),
}


# Files that `check` cannot call yet, or accuses. A file that it finds right must be taken off.
WAITING: set[str] = {}
LATE = [pytest.mark.xfail(strict=True)]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=LATE if path.stem in WAITING else []) for path in FILES]
)
def test_forms(path: Path) -> None:
    example = runpy.run_path(str(path))
    is_right(path, example, example["GIVEN"])


def is_right(path: Path, example: dict[str, Any], given: dict[str, Any]) -> None:
    report = conformance.check(f"{path}:{example['TARGET']}", **given)
    assert report.verdict == "right", str(report)
    assert "raises" not in report.codes
    assert given.get("ignore") or all(grade.right is not False for grade in report.grades)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("flash_attn_apply_rotary_emb", {"pairing": "interleaved", "layout": "thd"}),
        ("flashinfer_cos_sin_cache_inplace", {"rope": Rope(128, 10000.0, "interleaved", rotary_dim=64)}),
    ],
)
def test_forms_of_one_function(name: str, given: dict[str, Any]) -> None:
    path = Path(__file__).parent / "right" / f"{name}.py"
    is_right(path, runpy.run_path(str(path)), given)


def test_tables_of_rows_come_before_tables_for_all() -> None:
    """Tables with an axis for the rows are tried first, because tables without it give all rows the same positions."""
    path = Path(__file__).parent / "right" / "hugging_face_with_a_fixed_axis.py"
    report = conformance.check(f"{path}:Rotary,apply_rotary_pos_emb")
    assert (report.found["layout"], report.found["positions"]) == ("bhsd", "separate for each row of the batch")
    (rows,) = [grade for grade in report.grades if grade.name == "ragged rows"]
    assert rows.right is True
    report = conformance.check(f"{path}:Rotary,apply_rotary_pos_emb", layout="bshd")
    (rows,) = [grade for grade in report.grades if grade.name == "ragged rows"]
    assert rows.right is None
    assert rows.says.startswith("not judged: ")


@pytest.mark.parametrize("model", FAMILIES)
def test_transformers(model: str) -> None:
    name, _, layer = model.partition(", layer ")
    code, config = code_of(name)
    report = conformance.check(code, config=config, layer=int(layer) if layer else None)
    assert report.codes == [], str(report)


def test_transformers_with_tables_of_sin_and_cos() -> None:
    """The class of GPT-J returns sin first, as its function takes them, for the positions of the config."""
    if not hasattr(pytest.importorskip("transformers.models.gptj.modeling_gptj"), "GPTJRotaryEmbedding"):
        pytest.skip("before transformers 5.24, the attention of GPT-J computes its tables")
    code, config = code_of("gptj")
    report = conformance.check(code, config=config)
    assert (report.verdict, report.codes) == ("right", [])
    assert report.found["frequencies"] == "base 10000"


@pytest.mark.parametrize(
    ("function", "config"),
    [
        ("roformer.modeling_roformer:RoFormerSelfAttention.apply_rotary_position_embeddings", RoFormerConfig()),
        ("bamba.modeling_bamba:apply_rotary_pos_emb", None),
    ],
)
def test_transformers_function_alone(function: str, config: Any) -> None:
    report = conformance.check(f"transformers.models.{function}", config=config)
    assert (report.verdict, report.codes) == ("right", [])
    assert report.found["frequencies"] == "not judged: check passes the tables"


def test_transformers_with_several_kinds_of_layers() -> None:
    code, config = code_of("gemma3_text")
    with pytest.raises(RopeError, match="layers rotate in 2 ways") as e:
        conformance.check(code, config=config)
    assert "Pass one layer of each kind, each in its own check: 0 (base 10000), 5 (base 1000000)." in str(e.value)


def test_transformers_in_the_opposite_direction() -> None:
    """The config states the direction by its model_type. A function alone states none."""
    code, config = code_of("nanochat")
    report = conformance.check(code, config=config)
    assert (report.verdict, report.found["direction"]) == ("right", "backwards")
    function = "transformers.models.nanochat.modeling_nanochat:apply_rotary_pos_emb"
    assert conformance.check(function).codes == ["rotates-backwards"]
    assert conformance.check(function, ignore=["rotates-backwards"]).verdict == "right"


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn, not truncated": {"factor": 4.0, "original_max_position_embeddings": 8192, "truncate": False},
    "yarn, of a stated factor": {"factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "longrope": {
        "short_factor": [1 + i / 50 for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_transformers_scaled(name: str) -> None:
    scaling = {"rope_type": name.split(",")[0], "rope_theta": 500000.0, **SCALED[name]}
    config = LLAMA | {"max_position_embeddings": 32768, "rope_parameters": scaling}
    modeling = "transformers.models.llama.modeling_llama"
    report = conformance.check(f"{modeling}:LlamaRotaryEmbedding,apply_rotary_pos_emb", config=config)
    assert report.verdict == "right", str(report)
    says = {grade.name: (grade.right, grade.says) for grade in report.grades}
    assert says["earlier calls"] == (True, "as expected")
    assert says["other rows"] == (
        (None, "the longest row of the batch determines the frequencies of all, as in transformers")
        if name in ("dynamic", "longrope")
        else (True, "as expected")
    )


def _here(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as e:  # an old library with a new torch may raise anything
        pytest.skip(f"{module} cannot be imported: {type(e).__name__}")


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name: str) -> None:
    target, given = LIBRARIES[name]
    _here(target.rpartition(":")[0])
    report = conformance.check(target, **given)
    assert report.verdict == "right", str(report)


def test_rotary_embedding_torch() -> None:
    """This library is correct in float32. In bfloat16 it has a bug: it creates positions in the dtype of the input."""
    _here("rotary_embedding_torch")
    report = conformance.check("rotary_embedding_torch:RotaryEmbedding.rotate_queries_or_keys", pairing="interleaved")
    assert [finding.code for finding in report.findings if finding.severity == "wrong"] == ["low-precision-positions"]
    assert "bfloat16" in report.findings[0].says


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_ropewalk_module(layout: Any) -> None:
    rope = Rope(64, 500000.0, "half")
    assert conformance.check(RotaryEmbedding(rope, layout=layout), rope=rope, layout=layout).codes == []


def test_torchtune() -> None:
    """Only one file is imported, because the package needs packages that are not released for every torch."""
    if (spec := importlib.util.find_spec("torchtune")) is None:
        pytest.skip("torchtune is not installed")
    path = Path(str(spec.origin)).parent / "modules" / "position_embeddings.py"
    report = conformance.check(f"{path}:RotaryPositionalEmbeddings", pairing="interleaved")
    assert report.verdict == "right", str(report)


def test_a_query_whose_first_channels_are_changed_is_refused(tmp_path: Path) -> None:
    path = FILES[0].parent / "latent_query_of_all_channels.py"
    (changed := tmp_path / "changed.py").write_text(
        path.read_text().replace("torch.cat((nope,", "torch.cat((2 * nope,")
    )
    with pytest.raises(RopeError, match="must be callable in a known way"):
        conformance.check(f"{changed}:Rotary", **runpy.run_path(str(path))["GIVEN"])
