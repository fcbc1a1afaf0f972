"""Files of other programs: their ropes, and the config.json of the same model that is written from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oracle
from gguf_files import write
from ropewalk import RopeError, diff, from_config
from ropewalk.configs.tables.gguf import HF_MODEL_TYPES

CLASSES = {
    row["config"]["model_type"]: row
    for row in json.loads((Path(__file__).parents[1] / "golden" / "class_defaults.json").read_text())["rows"]
    if "variant" not in row
}
SIZES = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, "rope.freq_base": 1e6}
QWEN = {**SIZES, "context_length": 32_768}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32_768}
GEMMA3 = {**QWEN, "attention.key_length": 16, "attention.sliding_window": 512}


def gguf(folder: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    return write(folder / "model.gguf", keys, tensors, architecture=architecture)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("architecture", "scaled"), [("qwen2", False), ("qwen3", True), ("llama", True)])
def test_the_config_of_a_gguf_file(tmp_path: Path, architecture: str, scaled: bool, version: int) -> None:
    """It means the model of transformers, whose pairing is half. The ropes of the file remain as they are."""
    path = gguf(tmp_path, architecture, {**QWEN, "rope.dimension_count": 16, **(YARN if scaled else {})})
    ropes = from_config(path)
    written = from_config(ropes.to_hf_config(version=version))
    assert (written.model_type, len(written.layers), written.max_position_embeddings) == (architecture, 4, 32_768)
    assert written.rope.pairing == "half"
    assert ropes.rope.pairing == ("interleaved" if architecture == "llama" else "half")
    expected = oracle.yarn(1e6, 16, 4.0, 32_768) if scaled else oracle.inv_freq(1e6, 16)
    np.testing.assert_allclose(written.rope.inv_freq, np.array(expected, float), rtol=1e-12)


def test_two_kinds_of_layers(tmp_path: Path) -> None:
    ropes = from_config(gguf(tmp_path, "gemma3", {**GEMMA3, "block_count": 6}))
    config = ropes.to_hf_config(version=5)
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 512
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    bases = {kind: keys["rope_theta"] for kind, keys in config["rope_parameters"].items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}


def test_the_divisors_of_llama_3(tmp_path: Path) -> None:
    """The file has no parameters, so that other divisors than those of the released models cannot be written."""
    scaled = np.array(oracle.by_parts(1e6, 16, 8.0, 1, 4, 8192), float)
    divisors = (np.array(oracle.inv_freq(1e6, 16), float) / scaled).astype(np.float32)
    keys = {**QWEN, "rope.dimension_count": 16}
    ropes = from_config(gguf(tmp_path, "llama", keys, {"rope_freqs.weight": divisors}))
    written = ropes.to_hf_config(version=5)["rope_parameters"]
    assert (written["rope_type"], written["factor"]) == ("llama3", pytest.approx(8.0))
    assert (written["low_freq_factor"], written["high_freq_factor"]) == (1.0, 4.0)
    assert written["original_max_position_embeddings"] == 8192
    path = gguf(tmp_path, "llama", keys, {"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(RopeError, match="must have a rope_type to be written"):
        from_config(path).to_hf_config(version=5)
    with pytest.raises(RopeError, match="must have a rope_type to be written"):
        diff.engines(path)


@pytest.mark.parametrize("architecture", HF_MODEL_TYPES)
def test_the_model_types_of_architectures(tmp_path: Path, architecture: str) -> None:
    """transformers has a class for each of them, and its pairing is that of this class."""
    assert HF_MODEL_TYPES[architecture] in CLASSES


def test_engines_compare_a_gguf_file(tmp_path: Path) -> None:
    """Engines read its config.json, and llama.cpp the file itself."""
    path = gguf(tmp_path, "llama", {**QWEN, "context_length": 131_072, "rope.dimension_count": 16, **YARN})
    found = diff.engines(path)
    assert (found.verdict, found.facts["model_type"], found.facts["length"]) == ("agree", "llama", 131_072)
    notes = {entry["name"]: entry["notes"] for entry in found.facts["ropes"][0]["engines"]}
    assert [name for name, said in notes.items() if "It reads this file itself." in said] == ["llama.cpp"]
    assert "It was compared as the config.json of the same model, converted for transformers." in found.text()
    needed = diff.for_engine(path, "llama.cpp", length=65_536)
    assert (needed.verdict, needed.facts["command"]) == ("nothing needed", f"llama-server -m {path} -c 65536")
    assert diff.for_engine(path, "llama.cpp", length=200_000).verdict == "not trained"
    assert diff.for_engine(path, "vllm", length=65_536).verdict == "nothing needed"
    assert from_config(path, engine="vllm").rope.pairing == "half"


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("deepseek", {}, "the model_type of Hugging Face must follow from the GGUF file, got deepseek"),
        ("qwen2", {"rope.dimension_count": 8}, "the config.json of a qwen2 must be able to mean the ropes"),
    ],
)
def test_what_a_gguf_file_does_not_say(tmp_path: Path, architecture: str, keys: dict[str, Any], message: str) -> None:
    path = gguf(tmp_path, architecture, {**QWEN, **keys})
    with pytest.raises(RopeError) as raised:
        diff.engines(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)
    assert str(raised.value).endswith("Pass the config.json of the model.")


def test_a_draft_of_speculators() -> None:
    """Its config holds that of the draft's layers, whose rope is another one than that of the target."""
    layers = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
              "max_position_embeddings": 2048, "rope_theta": 1e4}  # fmt: skip
    draft = {"speculators_model_type": "eagle3", "model_type": "speculator_model", "draft_vocab_size": 8,
             "architectures": ["Eagle3Speculator"], "transformer_layer_config": layers}  # fmt: skip
    ropes = from_config(draft)
    assert (ropes.model_type, ropes.rope.base, ropes.max_position_embeddings) == ("llama", 1e4, 2048)
    assert from_config({key: value for key, value in draft.items() if key != "model_type"}).layers == ropes.layers
    target = {**layers, "num_hidden_layers": 4, "rope_theta": 1e6, "max_position_embeddings": 4096}
    found = diff.draft(target, draft)
    assert (found.alike, found.facts["reached"], found.facts["too_short"]) == (False, 2048, True)


MISTRAL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "rope_theta": 1e8,
           "max_position_embeddings": 262_144, "vision_encoder": {"image_size": 8},
           "yarn": {"original_max_position_embeddings": 8192, "factor": 48.0, "apply_scale": False, "beta": 32,
                    "alpha": 1}}  # fmt: skip
SCALED = {**MISTRAL, "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}}


@pytest.mark.parametrize(("config", "model_type"), [(MISTRAL, "mistral"), (SCALED, "ministral3")])
def test_the_params_json_of_mistral(tmp_path: Path, config: dict[str, Any], model_type: str) -> None:
    """Its own weights are interleaved, and those of transformers are not. Without apply_scale, the factor is not 1."""
    path = tmp_path / "params.json"
    path.write_text(json.dumps(config))
    ropes = from_config(tmp_path)
    assert (ropes.rope.pairing, ropes.rope.attention_factor, len(ropes.layers)) == ("interleaved", 1.0, 2)
    assert "Only the text model was read, not the encoder." in ropes.warnings
    written = from_config(ropes.to_hf_config(version=5))
    assert (written.model_type, written.rope.pairing) == (model_type, "half")
    for rope in (ropes.rope, written.rope):
        np.testing.assert_allclose(rope.inv_freq, np.array(oracle.yarn(1e8, 32, 48.0, 8192), float), rtol=1e-12)
    assert (ropes.query_scale is not None) == (config is SCALED)
    found = diff.engines(path, names=("transformers", "vllm"))
    assert (found.verdict, found.facts["query_scale"]) == ("agree", {})
    magnitude = {**config, "yarn": {**config["yarn"], "apply_scale": True}}
    assert from_config(magnitude).rope.attention_factor == pytest.approx(0.1 * np.log(48) + 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"yarn": {"factor": 4.0}}, "original_max_position_embeddings"),
        ({"yarn": {**MISTRAL["yarn"], "mscale": 1}}, "the keys of yarn and llama_4_scaling must be"),
        ({"yarn": 4}, "yarn must be an object, got 4"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 1, "beta": 0.1}}, "must be that of yarn"),
        ({"rope_theta": None}, "rope_theta"),
        ({"qk_rope_head_dim": 64}, "belongs to latent attention"),
    ],
)
def test_what_a_params_json_of_mistral_does_not_say(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        from_config({**MISTRAL, **keys})
