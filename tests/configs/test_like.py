"""Configs with an unknown model_type that are read by the rules of a known one (`like`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ropewalk import Axes, Rope, RopeError, from_config
from ropewalk.tools.cli import main

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 4096}
FERN: dict[str, Any] = {"model_type": "fern", "rope_theta": 50_000.0, **SIZES}
"""A config of an invented model."""
SAYS = "model_type 'fern' is not known and is read by the rules of {0}, as like='{0}' asks."


@pytest.mark.parametrize(
    ("like", "keys", "rope"),
    [
        ("llama", {}, Rope(16, 50_000.0, "half")),
        ("cohere", {}, Rope(16, 50_000.0, "interleaved")),
        ("stablelm", {}, Rope(16, 50_000.0, "half", rotary_dim=4)),
        (
            "qwen2_vl",
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            Rope(16, 50_000.0, "half", axes=Axes.sections((2, 3, 3))),
        ),
    ],
)
def test_rules_of_a_known_model(like: str, keys: dict[str, Any], rope: Rope) -> None:
    ropes = from_config({**FERN, **keys}, like=like)
    assert ropes.layers == (rope,) * 3
    assert (ropes.model_type, ropes.like) == ("fern", like)
    assert SAYS.format(like) in ropes.warnings
    assert SAYS.format(like) in ropes.explain()
    assert ropes.explain().startswith("config (model_type fern)")


def test_a_config_without_model_type() -> None:
    without = {key: value for key, value in FERN.items() if key != "model_type"}
    with pytest.raises(RopeError, match=r'must be a string, got None\. Add it, such as "llama", if'):
        from_config(without)
    ropes = from_config(without, like="cohere")
    assert (ropes.model_type, ropes.rope) == ("cohere", Rope(16, 50_000.0, "interleaved"))
    assert ropes.warnings[0] == "The missing model_type is read by the rules of cohere, as like='cohere' asks."


def test_inside_a_known_model() -> None:
    ropes = from_config({"model_type": "llava", "text_config": FERN}, like="cohere")
    assert ropes.rope == Rope(16, 50_000.0, "interleaved")
    assert (ropes.model_type, SAYS.format("cohere") in ropes.warnings) == ("fern", True)


def test_a_model_that_contains_others() -> None:
    values = {
        "model_type": "fern",
        "llm_config": {**FERN, "model_type": "cohere"},
        "vision_config": {"model_type": "x"},
    }
    with pytest.raises(RopeError, match=r"config: llm_config: model_type must be one that ropewalk does not know"):
        from_config(values, like="internvl_chat")
    values = {"model_type": "fern", "thinker_config": {"model_type": "qwen2_5_omni_thinker"}}
    with pytest.raises(RopeError, match="text_config must be an object"):
        from_config(values, like="qwen2_5_omni")
    ropes = from_config({"model_type": "fern", "global_config": {**FERN, "model_type": "llama"}}, like="blt")
    assert ropes.rope == Rope(16, 50_000.0, "half")
    assert (ropes.model_type, ropes.like, ropes.warnings[0]) == ("llama", "", SAYS.format("blt"))


@pytest.mark.parametrize("version", [4, 5])
def test_written_configs_keep_the_model_type(version: int) -> None:
    read = from_config({**FERN, "rope_scaling": {"type": "linear", "factor": 2.0}}, like="llama")
    written = read.to_hf_config(version=version)
    assert written["model_type"] == "fern"
    assert ("rope_parameters" in written) is (version == 5)
    assert from_config(written, like="llama").layers == read.layers


@pytest.mark.parametrize(
    ("config", "passed", "message"),
    [
        ({**FERN, "model_type": "mistral"}, {}, "config: model_type must be one that ropewalk does not know if like is passed, got 'mistral'. Omit like."),
        ({"model_type": "llava", "text_config": {**FERN, "model_type": "llama"}}, {}, "config: text_config: model_type must be one that ropewalk does not know"),
        ({**FERN, "model_type": 3}, {}, "model_type must be one that ropewalk does not know if like is passed, got 3"),
        ({"model_type": "qwen2_5_vl_vision", "hidden_size": 64, "num_heads": 4}, {}, "from_config: like requires a Hugging Face config of a text model, got qwen2_5_vl_vision, a vision tower"),
        (FERN, {"like": "lama"}, "from_config: like must be a model_type that ropewalk knows, got 'lama'. `ropewalk explain --list` lists them. Did you mean 'llama'?"),
        (FERN, {"like": "bert"}, "bert has no rotary positions"),
        (FERN, {"like": 3}, "from_config: like must be a model_type, got 3"),
        (FERN, {"pairing": "half"}, "from_config: like and pairing must not both be passed"),
        (FERN, {"engine": "vllm"}, "from_config: like and engine must not both be passed"),
        ({"dim": 64, "n_layers": 2, "n_heads": 4}, {}, "from_config: like requires a Hugging Face config of a text model, got Meta's params.json"),
        ({"_class_name": "FluxTransformer2DModel"}, {}, "from_config: like requires a Hugging Face config of a text model, got a config of diffusers"),
        ("model.gguf", {}, "from_config: like requires a Hugging Face config of a text model, got a GGUF file. Pass such a config, or omit like."),
    ],
)  # fmt: skip
def test_refusals(config: Any, passed: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeError) as raised:
        from_config(config, **{"like": "llama", **passed})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("LlamaForCausalLM", "llama"),
        ("LlamaForSequenceClassification", "llama"),
        ("Qwen2ForRewardModel", "qwen2"),
        ("InternLM2ForRewardModel", "internlm2"),
        ("LlamaRewardModel", "llama"),
        ("Qwen2ForProcessRewardModel", "qwen2"),
        ("MistralModel", "mistral"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        ("LlavaForConditionalGeneration", "llava"),
    ],
)
def test_an_unknown_model_type_of_a_known_class(name: str, like: str) -> None:
    """The message proposes a call, which changes the message or reads the config."""
    with pytest.raises(RopeError) as raised:
        from_config({**FERN, "architectures": [name]})
    assert f"Its class is {name}. If it rotates as {like} does, pass like='{like}'." in str(raised.value)


@pytest.mark.parametrize("classes", [["FernForCausalLM"], ["LlamaFernForCausalLM"], ["Llama"], [3], "LlamaModel", None])
def test_no_proposal_for_other_classes(classes: object) -> None:
    with pytest.raises(RopeError) as raised:
        from_config({**FERN, "architectures": classes})
    assert "Its class is" not in str(raised.value)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**FERN, "architectures": ["Qwen2ForRewardModel"]}))
    refused = CliRunner().invoke(main, ["explain", str(path)])
    assert "If it rotates as qwen2 does, pass --like qwen2." in refused.output
    shown = CliRunner().invoke(main, ["explain", str(path), "--like", "qwen2"])
    assert shown.exit_code == 0
    assert f"{path} (model_type fern)" in shown.output
    assert SAYS.format("qwen2").partition(", as")[0] in shown.output
