"""Files of other programs: their ropes, and the config.json of the same model that is written from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import oracle
from gguf_files import write
from ropewalk import Rope, RopeError, diff, from_config
from ropewalk.configs.models import ARCHITECTURES
from ropewalk.configs.tables.gguf import HF_MODEL_TYPES
from ropewalk.tools.extend import extend

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
    """Each of them has a row, and its pairing is that of this row."""
    assert not ARCHITECTURES[HF_MODEL_TYPES[architecture].split("/")[-1]].refusal


HALF = {"attention.key_length": 32, "rope.dimension_count": 16}
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0], "attention.key_length": 16}
OF_QWEN_3_5 = {"attention.key_length": 64, "rope.dimension_count": 16}


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("afmoe", {"attention.sliding_window": 512}),
        ("baichuan", {"block_count": 32, "embedding_length": 4096, "attention.head_count": 32}),
        ("bailingmoe", {}),
        ("bailingmoe2", HALF),
        ("eurobert", {}),
        ("exaone", {}),
        ("exaone-moe", {"attention.sliding_window": 512}),
        ("falcon-h1", {}),
        ("gemma3n", {"attention.sliding_window": 512, "attention.key_length": 16}),
        ("glm4", HALF),
        ("glm4moe", HALF),
        ("hunyuan-dense", {}),
        ("hunyuan-moe", {}),
        ("hy_v3", {}),
        ("internlm2", {}),
        ("jais2", {}),
        ("laguna", {"attention.sliding_window": 512, "rope.freq_base_swa": 1e4}),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0, 2]}),
        ("lfm2moe", {"attention.head_count_kv": [0, 2, 0, 2]}),
        ("mellum", {"attention.sliding_window": 512}),
        ("minicpm", {}),
        ("minimax-m2", HALF),
        ("minimax-m3", {"attention.indexer.key_length": 16}),
        ("modern-bert", {"attention.sliding_window": 512, "rope.freq_base_swa": 1e4}),
        ("nomic-bert", {}),
        ("orion", {}),
        ("qwen2vl", SECTIONS),
        ("qwen35", {**SECTIONS, **OF_QWEN_3_5}),
        ("qwen35moe", {**SECTIONS, **OF_QWEN_3_5}),
        ("qwen3vl", SECTIONS),
        ("qwen3vlmoe", SECTIONS),
        ("qwen3next", {"attention.key_length": 32, "rope.dimension_count": 8}),
        ("xverse", {}),
    ],
)
def test_a_gguf_file_lacks_only_keys_that_do_not_rotate(
    tmp_path: Path, architecture: str, keys: dict[str, Any]
) -> None:
    """No engine is said to refuse the model because a GGUF file does not have all keys of its config.json."""
    found = diff.engines(gguf(tmp_path, architecture, {**QWEN, **keys}))
    assert set(found.facts["states"].values()) <= {"same", "absent", "unknown"}
    not_run = {"baichuan": "absent", "exaone": "absent", "xverse": "unknown"}  # by vLLM
    assert found.facts["states"]["vLLM"] == not_run.get(architecture, "same")
    assert found.facts["states"]["llama.cpp"] == "same"


@pytest.mark.parametrize("architecture", ["jamba", "kimi-linear", "nemotron_h", "nemotron_h_moe"])
def test_a_gguf_file_of_which_no_layer_rotates(tmp_path: Path, architecture: str) -> None:
    """llama_model_rope_type returns LLAMA_ROPE_TYPE_NONE for it, whatever the file says of a base and channels."""
    path = gguf(tmp_path, architecture, {**QWEN, "rope.dimension_count": 16, "attention.key_length_mla": 24})
    ropes = from_config(path)
    assert (ropes.layers, ropes.origins["pairing"].split()[2]) == ((None,) * 4, "NONE")
    assert from_config(ropes.to_hf_config(version=4)).layers == ropes.layers
    assert extend(path, 32_768, engines=("llama.cpp",)).complete


def test_engines_compare_a_gguf_file(tmp_path: Path) -> None:
    """Engines read its config.json, and llama.cpp the file itself."""
    path = gguf(tmp_path, "llama", {**QWEN, "context_length": 131_072, "rope.dimension_count": 16, **YARN})
    found = diff.engines(path)
    assert (found.verdict, found.facts["model_type"], found.facts["length"]) == ("agree", "llama", 131_072)
    notes = {entry["name"]: entry["notes"] for entry in found.facts["ropes"][0]["engines"]}
    assert [name for name, said in notes.items() if "It reads this file itself." in said] == ["llama.cpp"]
    assert "It was compared as the config.json of the same model, converted for transformers." in found.text()
    found = extend(path, 65_536, engines=("llama.cpp", "vllm"))
    assert (found.complete, found.facts["reaches"]) == (True, True)
    assert not extend(path, 200_000, engines=("llama.cpp",)).facts["reaches"]
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
    assert "1 layers instead of 4, 1 of 1 layers rotate differently" in diff.configs(target, draft).text()
    alike = {**draft, "transformer_layer_config": {**layers, "rope_theta": 1e6}}
    assert "Different: 1 layers instead of 4, the first rotates identically." in diff.configs(target, alike).text()
    # llama_eagle3.py of vLLM and SGLang rotates as llama.py. Files of other engines for drafts were not read.
    eagle = {**layers, "draft_vocab_size": 8, "architectures": ["LlamaForCausalLMEagle3"]}
    for config, ours in ((draft, {"vLLM"}), (eagle, {"vLLM", "SGLang"})):
        found = diff.engines(config)
        assert {name for name, state in found.facts["states"].items() if state != "unknown"} == ours
        assert "for a draft" in found.text()
        # `ModelConfig._derive_context_length` of SGLang 0.5.23 (SpecForge, pull request 271).
        raises = "SGLang raises an error if max_position_embeddings is below the length of the target."
        assert [w.partition("19036). ")[2] for w in from_config(config).warnings] == [raises]


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
    assert (found.verdict, found.facts["beside"]) == ("agree", {})
    magnitude = {**config, "yarn": {**config["yarn"], "apply_scale": True}}
    assert from_config(magnitude).rope.attention_factor == pytest.approx(0.1 * np.log(48) + 1)


@pytest.mark.parametrize("apply", [False, True])
def test_latent_attention_in_the_params_json_of_mistral(apply: bool) -> None:
    """As vLLM runs it, in DeepSeek's class. apply_scale is about the softmax scale there, not about cos and sin."""
    sizes = {**SCALED, "head_dim": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "kv_lora_rank": 8}
    config = {**sizes, "yarn": {**SCALED["yarn"], "apply_scale": apply}}
    ropes = from_config(config)
    assert (ropes.model_type, ropes.rope.pairing, ropes.rope.attention_factor) == ("mistral4", "interleaved", 1.0)
    np.testing.assert_allclose(ropes.rope.inv_freq, np.array(oracle.yarn(1e8, 8, 48.0, 8192), float), rtol=1e-12)
    assert ropes.softmax_factor == pytest.approx((0.1 * np.log(48) + 1) ** 2 if apply else 1.0)
    assert ropes.query_scale is not None
    engines = diff.engines(config, names=("vllm", "mlx-lm")).facts["ropes"][0]["engines"]
    assert [engine["refused"] for engine in engines] == [None, None]
    unscaled = {key: value for key, value in sizes.items() if key not in ("yarn", "llama_4_scaling")}
    np.testing.assert_allclose(from_config(unscaled).rope.inv_freq, Rope(8, 1e8, "half").inv_freq, rtol=1e-12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"yarn": {"factor": 4.0}}, "original_max_position_embeddings"),
        ({"yarn": {**MISTRAL["yarn"], "mscale": 1}}, "the keys of yarn and llama_4_scaling must be"),
        ({"yarn": 4}, "yarn must be an object, got 4"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 1, "beta": 0.1}}, "must be that of yarn"),
        ({"rope_theta": None}, "rope_theta"),
    ],
)
def test_what_a_params_json_of_mistral_does_not_say(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        from_config({**MISTRAL, **keys})


LITGPT = json.loads((Path(__file__).parents[1] / "golden" / "litgpt.json").read_text())["rows"]


@pytest.mark.parametrize("row", LITGPT, ids=lambda row: row["config"]["name"])
def test_the_config_of_litgpt(tmp_path: Path, row: dict[str, Any]) -> None:
    """litgpt's own code computed cos and sin of position 3, for layers with rope_base and with rope_local_base_freq."""
    config, path = row["config"], tmp_path / "model_config.yaml"
    path.write_text(yaml.safe_dump(config))
    ropes, count = from_config(tmp_path), config["n_layer"]
    for rope, index in zip(ropes.layers, config["rope_indices"] or [0] * count, strict=True):
        assert rope is not None
        cos, sin = row["tables"][2 * index : 2 * index + 2]
        assert (rope.pairing, len(cos)) == ("half", rope.rotary_dim)
        expected = [np.tile(f(3 * rope.inv_freq), 2) for f in (np.cos, np.sin)]
        np.testing.assert_allclose([cos, sin], expected, rtol=0, atol=3 * 2**-23 + 1e-6)
    windows = [config["sliding_window_size"] if slides else None for slides in config["sliding_window_indices"] or []]
    assert [ropes.window(i) for i in range(count)] == (windows or [None] * count)
    if "condensed" not in config["name"]:  # Gemma 3 of transformers does not divide the positions of local layers
        written = from_config(ropes.to_hf_config(version=5))
        assert written.max_position_embeddings == config["block_size"]
        for ours, theirs in zip(ropes.layers, written.layers, strict=True):
            assert ours is not None
            assert theirs is not None
            np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_adjustments": {"factor": 4.0, "beta_fast": 32, "beta_slow": 1}}, "slows the fast pairs instead of the"),
        ({"rope_adjustments": {"factor": 8.0, "low_freq_factor": 1.0}}, "must have factor, low_freq_factor, high_freq"),
        ({"latent_attention": {"qk_rope_head_dim": 64}}, "the keys of latent attention were not looked up"),
        ({"rope_indices": [0], "rope_local_base_freq": 1e4}, "must be a list of at least 2 numbers, 0 or 1"),
    ],
)
def test_what_is_not_read_of_litgpt(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        from_config({**LITGPT[0]["config"], **keys})


def test_yaml_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text("n_layer: [")
    with pytest.raises(RopeError, match="the file must contain YAML"):
        from_config(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RopeError, match=r"PyYAML must be installed to read it.*pip install pyyaml"):
        from_config(path)
