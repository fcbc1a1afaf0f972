"""`ropewalk extend`: the config and the commands for a longer text, against recorded and running code of engines."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from click.testing import CliRunner

import gguf_files
from ropewalk import RopeError, diff, from_config
from ropewalk.tools.cli import main
from ropewalk.tools.extend import extend, write

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "engine_commands.json").read_text())
ROWS = {(row["engine"], row["case"]): row for row in GOLDEN["rows"]}
LONG = 131_072
FLAT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


GEMMA_2 = {**FLAT, "model_type": "gemma2", "head_dim": 256, "sliding_window": 4096, "rope_theta": 1e4}
GEMMA_2["max_position_embeddings"] = 8192
BETAS = "--yarn-beta-fast 32 --yarn-beta-slow 1"


def of(found: Any, name: str) -> dict[str, Any]:
    return next(entry for entry in found.facts["engines"] if entry["name"] == name)


def commands(found: Any) -> str:
    """Return the commands for llama.cpp."""
    return "\n".join(of(found, "llama.cpp")["commands"])


def keys(command: str) -> dict[str, Any]:
    """Return the JSON in a command, as a shell passes it."""
    return json.loads(next(word for word in shlex.split(command) if word.startswith("{")))


def factor_of(row: dict[str, Any]) -> float:
    """Return the factor in the override of a row."""
    return float(re.findall(r'"factor": ([0-9.]+)', json.dumps(row["override"]))[0])


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("method", ["llama3", "yarn", "linear"])
def test_the_engine_accepts_the_length(engine: str, method: str) -> None:
    """The engine's own code was run on the config with these keys, and accepted the length."""
    row = ROWS[engine, f"length {method}"]
    found = extend(row["config"], row["length"], method=method, new_factor=factor_of(row))
    command = of(found, engine)["commands"][0]
    assert keys(command) == row["override"]
    assert row["accepted"]
    assert int(shlex.split(command)[-1]) == row["length"]


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        *[
            (engine, model)
            for engine in ("vLLM", "SGLang")
            for model in ("Gemma 3", "gpt-oss", "DeepSeek V3", "Command R")
        ],
        ("vLLM", "Mistral's params.json"),
        ("vLLM", "Mistral's params.json with an encoder"),
    ],
)
def test_the_engine_accepts_the_length_of_this_model(engine: str, model: str) -> None:
    row = ROWS[engine, f"length of {model}"]
    found = extend(row["config"], row["length"], new_factor=factor_of(row))
    assert keys(of(found, engine)["commands"][0]) == row["override"]
    assert row["accepted"]
    assert not ROWS[engine, "length of Command R without model_max_length"]["accepted"]


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_a_scaled_config_needs_its_length(engine: str) -> None:
    """Without it, the engine's own code refuses the length, as it does for the override of Qwen's model cards."""
    row = ROWS[engine, "length of a scaled config"]
    found = extend(row["config"], row["length"])
    assert (found.facts["reaches"], found.plans) == (True, ())
    assert keys(of(found, engine)["commands"][0]) == row["override"]
    assert row["accepted"]
    assert not ROWS[engine, "length of a scaled config alone"]["accepted"]
    assert not ROWS[engine, "length yarn of a model card"]["accepted"]


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "llama.cpp"])
def test_the_engines_have_these_arguments(engine: str) -> None:
    command = of(extend(FLAT, LONG), engine)["commands"][0]
    arguments = set(re.findall(r" (--?[a-z-]+)", re.sub("'.*'", "", command))) - {"--model-path", "-m"}
    assert len(arguments) >= 2
    assert arguments <= set(ROWS[engine, "arguments"]["arguments"])


@pytest.mark.parametrize("method", ["llama3", "yarn", "linear", "ntk"])
def test_transformers_computes_the_ropes_of_the_config(method: str) -> None:
    """transformers' own class is built from the written config, for a factor of 8."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    written = extend(FLAT, LONG, method=method, new_factor=8.0).config()
    assert written["max_position_embeddings"] == LONG
    rope = from_config(written).rope
    theirs = Qwen2RotaryEmbedding(AutoConfig.for_model(**written))
    np.testing.assert_allclose(rope.inv_freq, theirs.inv_freq.numpy(), rtol=2e-5)
    assert from_config(FLAT).rope.inv_freq[-1] / rope.inv_freq[-1] == pytest.approx(8.0)


def test_the_factors_without_a_measurement() -> None:
    """2 times 131,072 / 32,768; llama.cpp has no arguments for Llama 3's scheme."""
    found = extend({**FLAT, "model_type": "llama"}, LONG)
    assert [(plan.method, plan.factor) for plan in found.plans] == [("llama3", 8.0), ("yarn", 8.0)]
    assert [of(found, name)["plan"] for name in ("vLLM", "llama.cpp")] == [0, 1]
    assert of(found, "llama.cpp")["commands"] == [
        "llama-server -m MODEL.gguf --rope-scaling yarn --rope-scale 8 --yarn-orig-ctx 32768 --yarn-beta-fast 32 "
        "--yarn-beta-slow 1 --rope-freq-base 1000000 -c 131072"
    ]
    text = " ".join(found.text().split())
    assert "If the model card recommends numbers, take those" in text


@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_programs_around_llama_cpp_without_its_arguments(tmp_path: Path, method: str) -> None:
    """The converter writes YaRN and linear scaling into the file (`golden/engine_rules/rules_of_llama_cpp.json`)."""
    found = extend(FLAT, LONG, method=method, engines=("llama.cpp",))
    about = "read them from a GGUF file that convert_hf_to_gguf.py makes from the config that --write writes."
    assert sum(about in note for note in of(found, "llama.cpp")["notes"]) == 1
    assert diff.engines(found.config(version=4), names=("transformers", "llama.cpp")).verdict == "agree"
    path = gguf_files.write(tmp_path / "q.gguf", GGUF, architecture="qwen3")
    of_file, short = (
        of(each, "llama.cpp")["notes"] for each in (extend(path, 163_840, method=method), extend(FLAT, 16_384))
    )
    assert not any("convert_hf_to_gguf" in note for note in (*of_file, *short))
    other = "such as Ollama (not its older versions), need another GGUF file: pass the config.json of the model."
    assert [any(note.endswith(other) for note in notes) for notes in (of_file, short)] == [True, False]


@pytest.mark.parametrize(
    ("model", "trained", "target", "who", "factor"),
    [
        ("qwen2", 32_768, LONG, "Qwen2.5", 4.0),  # the numbers of its card
        ("qwen3_moe", 262_144, 1_010_000, "Qwen3-Coder", 3.86),
        ("smollm3", 65_536, LONG, "SmolLM3", 2.0),
        ("qwen3_5_text", 262_144, 8 * LONG, "Qwen3.5", 4.0),
        ("qwen2", 32_768, LONG + 1, "", 8.01),  # farther than the card goes
        ("qwen2", 65_536, LONG, "", 4.0),
        ("qwen2_5_vl", 32_768, LONG, "", 8.0),  # whose card advises against it
    ],
)
def test_what_the_authors_recommend(model: str, trained: int, target: int, who: str, factor: float) -> None:
    config = {**FLAT, "model_type": model, "max_position_embeddings": trained, "head_dim": 128}
    if model == "qwen3_5_text":
        mrope = {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        config |= {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", **mrope}}
    found = extend(config, target)
    said = " ".join(found.text().split())
    assert (found.plans[0].factor, f"The authors of {who} recommend this." in said) == (factor, bool(who))
    assert ("the model card recommends" in said) is not bool(who)
    if who:
        assert [plan.method for plan in found.plans] == ["yarn"]
        assert "(the ratio of the lengths)" in said
        assert extend(config, target, method="linear").plans[0].factor > 1.9 * factor


@pytest.mark.parametrize("method", ["llama3", "yarn"])
def test_this_factor_reached_the_target_in_each_measurement(method: str) -> None:
    """Or the next smaller one that was measured."""
    paths = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("extend-*.json"))
    assert len(paths) == 5
    for path in paths:
        facts = json.loads(path.read_text())
        [plan] = extend(
            {**FLAT, "model_type": "llama", "max_position_embeddings": facts["stated_length"]},
            facts["target"],
            method=method,
        ).plans
        rows = [row for row in facts["rows"] if row["method"] == method and row["factor"] <= plan.factor]
        assert max(rows, key=lambda row: row["factor"])["at_target"] >= facts["bar"]


@pytest.mark.parametrize(
    ("scaling", "longest", "method", "factor"),
    [
        *[  # max_position_embeddings is the length if the factor has a margin of at most 2
            ({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32_768}, longest, "yarn", 16.0)
            for factor, longest in ((4.0, LONG), (8.0, LONG))
        ],
        *[
            (
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": before,
                },
                LONG,
                "llama3",
                32.0,
            )
            for before in (16_384, 8192)
        ],
        ({"rope_type": "dynamic", "factor": 4.0}, 32_768, "llama3", 16.0),
    ],
)
def test_a_scaling_is_replaced_and_never_applied_twice(
    scaling: dict[str, Any], longest: int, method: str, factor: float
) -> None:
    """The factor is the margin times 262,144, divided by the length before scaling."""
    config = {**FLAT, "max_position_embeddings": longest, "rope_scaling": scaling}
    found = extend(config, 2 * LONG)
    assert (found.plans[0].method, found.plans[0].factor) == (method, factor)
    parameters = found.config()["rope_parameters"]
    before = scaling.get("original_max_position_embeddings")
    assert before is None or parameters["original_max_position_embeddings"] == before
    text = " ".join(found.text().split())
    assert "It replaces the scaling of the config." in text
    enough = re.search(r"new_factor=([\d.]+) is enough", text)
    expected = {(32_768, 8.0): 8.0}.get((before, scaling["factor"]))  # what a model card may recommend
    assert (enough and float(enough[1])) == expected
    assert extend(config, 2 * LONG, new_factor=expected).plans[0].factor == (expected or factor)


def test_the_length_before_linear_scaling_is_asked_for() -> None:
    """LLaMA-2-7B-32K and deepseek-coder state alike 4,096 tokens before and 16,384 after a linear scaling."""
    config = {**FLAT, "max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 8.0}}
    with pytest.raises(RopeError, match=r"original must be given.* got none.*original=4096.*original=512 if"):
        extend(config, 32_768)
    found = extend(config, 32_768, original=4096, engines=("llama.cpp", "transformers"))
    assert (found.facts["reaches"], found.complete, found.plans) == (True, True, ())
    assert "llama-server -m MODEL.gguf -c 32768" in commands(found)
    assert "without scaling" not in found.text()
    for original, factor in ((4096, 32.0), (512, 256.0)):
        found = extend(config, 65_536, original=original, engines=("llama.cpp",))
        assert f"--rope-scale {factor:g} --rope-freq-base" in commands(found)
    yarn = extend(config, 65_536, original=4096, method="yarn", new_factor=16.0, engines=("llama.cpp",))
    assert "--rope-scale 16 --yarn-orig-ctx 4096" in commands(yarn)
    assert extend(config, 4096).facts["reaches"]


def test_a_config_without_scaling_that_states_more_than_the_model_was_trained_for() -> None:
    """nomic-embed-text-v1.5 was trained for 2,048 tokens and states 8,192, for which its card adds a scaling."""
    nomic = {"model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 3072,
             "n_positions": 8192, "max_trained_positions": 2048, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
             "activation_function": "swiglu"}  # fmt: skip
    assert [plan.method for plan in extend(nomic, 8192, engines=("vllm",)).plans] == ["llama3", "yarn"]
    said = " ".join(extend(nomic, 8192, engines=("vllm",), method="yarn", new_factor=4.0).text().split())
    assert "The config states 8,192 tokens: it was trained for 2,048 and is without scaling." in said
    assert "It counts from 2,048 tokens." in said
    assert "It reaches the length" in " ".join(extend(nomic, 2048, engines=("vllm",)).text().split())
    scaled = extend(nomic, 8192, engines=("vllm",), method="yarn").facts["plans"][0]["config"]["rope_parameters"]
    assert (scaled["factor"], scaled["original_max_position_embeddings"]) == (8.0, 2048)


def test_only_layers_without_a_window_are_scaled() -> None:
    found = extend(GEMMA, LONG, engines=("vllm", "transformers", "llama.cpp"))
    parameters = found.config()["rope_parameters"]
    assert (parameters["full_attention"]["factor"], parameters["sliding_attention"]["rope_type"]) == (8.0, "default")
    assert found.plans[0].layers == [5]
    for scheme in ("yarn", "linear"):  # llama.cpp's own lines leave such a layer as it is, up to their rounding
        row = ROWS["llama.cpp", f"{scheme} in a layer with a window"]
        np.testing.assert_allclose(row["inv_freq"], 1e6 ** -(np.arange(64) / 64), rtol=2 * 64 * 2**-24)
        assert row["attention_factor"] == 1.0
    assert f"--rope-scale 8 --yarn-orig-ctx 32768 {BETAS} --rope-freq-base 1000000 -c 131072" in commands(found)
    # The config of Gemma 2 states one rope for all layers, but llama.cpp changes only those that see the whole text.
    found = extend(GEMMA_2, 32_768)
    assert (found.plans[0].layers, of(found, "llama.cpp")["plan"]) == ([0, 1, 2, 3], 1)
    assert f"--rope-scale 8 --yarn-orig-ctx 8192 {BETAS} --rope-freq-base 10000 -c 32768" in commands(found)
    assert "do not change layers with a window" in of(found, "llama.cpp")["notes"][0]
    wide = extend({**GEMMA_2, "sliding_window": 16_384}, 32_768, engines=("llama.cpp",))
    assert "its arguments change only layers without a window" in of(wide, "llama.cpp")["why_not"][1]
    # That of gpt-oss states it as well, and its layers with a window are scaled.
    found = extend(ROWS["vLLM", "length of gpt-oss"]["config"], 2 * LONG, engines=("llama.cpp",))
    assert (commands(found), len(found.plans[0].layers)) == ("", 2)
    assert "its arguments change only layers without a window" in of(found, "llama.cpp")["why_not"][0]
    # In EXAONE 4 only layers with a window rotate.
    exaone = {**FLAT, "model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": 4}
    found = extend(exaone, LONG)
    assert [(plan.method, plan.layers) for plan in found.plans] == [("none", [])]
    assert keys(of(found, "vLLM")["commands"][0]) == {"max_position_embeddings": LONG}
    assert "--override-kv exaone4.context_length=int:131072" in of(found, "llama.cpp")["notes"][0]
    # Those of Muse Glimmer too, whose flags of YaRN change nothing (meta-oss-cookbook#37, src/models/muse-glimmer.cpp).
    glimmer = {**FLAT, "model_type": "muse_glimmer_text", "num_hidden_layers": 4, "sliding_window": 2048}
    glimmer |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "layer_rope_theta": [5e5] * 3 + [0]}
    glimmer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "head_dim": 64}
    del glimmer["rope_theta"]
    found = extend({"model_type": "muse_glimmer", "text_config": glimmer}, LONG)
    assert [entry["name"] for entry in found.facts["engines"] if not entry["commands"]] == []
    assert of(found, "llama.cpp")["commands"] == ["llama-server -m MODEL.gguf -c 131072"]
    assert "context_length=int:131072" in of(found, "llama.cpp")["notes"][0]


def test_an_engine_without_the_windows_of_a_model() -> None:
    """llama.cpp disables the window of Phi-3, and SGLang runs it as a Llama, so their layers see the whole text."""
    phi = {**FLAT, "model_type": "phi3", "max_position_embeddings": 4096, "sliding_window": 2047}
    found = extend(phi, 16_384)
    assert [(plan.method, plan.layers) for plan in found.plans] == [("none", [])]
    assert [bool(entry["commands"]) for entry in found.facts["engines"]] == [True, False, False, True]
    assert "not found to apply windows to phi3" in of(found, "SGLang")["why_not"][0]
    # modern-bert.cpp and mimo2.cpp apply them, and take freq_scale and freq_base of each layer.
    bert = {"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 4}
    bert |= {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "local_attention": 128}
    mimo = {**FLAT, "model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}
    mimo |= {
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "sliding_window": 128,
        "partial_rotary_factor": 1.0,
        "head_dim": 64,
    }
    for config, base in (({**bert, "max_position_embeddings": 8192}, 160_000), (mimo, 5_000_000)):
        found = extend(config, 4 * LONG, engines=("llama.cpp",))
        assert f"{BETAS} --rope-freq-base {base} -c " in commands(found), found.text()


def test_the_softmax_of_deepseek_follows_the_flags() -> None:
    """deepseek2.cpp reads mscale_all_dim from the file and the factor from the arguments."""
    assert ROWS["llama.cpp", "yarn of DeepSeek"]["attention_factor"] == 1.0
    config = ROWS["vLLM", "length of DeepSeek V3"]["config"]
    assert f"--rope-scale 128 --yarn-orig-ctx 4096 {BETAS}" in commands(
        extend(config, 2 * LONG, engines=("llama.cpp",))
    )
    found = extend(config, 2 * LONG, engines=("llama.cpp",), method="linear")
    assert of(found, "llama.cpp")["why_not"] == ["no argument of it replaces mscale_all_dim, which is in its file"]


def test_what_a_config_states_for_engines() -> None:
    """Command R states its length in model_max_length. With chunks, vLLM and SGLang rotate by another class."""
    command = {**FLAT, "model_type": "cohere", "max_position_embeddings": 8192, "model_max_length": LONG}
    found = extend(command, LONG)
    assert (found.facts["reaches"], found.complete) == (True, True)
    assert "The config states 131,072 tokens, without scaling." in found.text()
    assert keys(of(found, "vLLM")["commands"][0]) == {"max_position_embeddings": LONG}
    assert extend(command, 2 * LONG).plans[0].factor == 4.0
    assert from_config(command).trained_length == LONG
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert from_config({**command, "rope_scaling": yarn}).trained_length == 32_768
    kimi = {**FLAT, "model_type": "kimi_linear", "max_position_embeddings": None, "model_max_length": 8 * LONG}
    assert of(extend(kimi, 8 * LONG), "vLLM")["commands"][0] == "vllm serve MODEL --max-model-len 1048576"
    for model, name in (("kimi_linear", "kimi-linear"), ("nemotron_h", "<general.architecture>")):  # it has two names
        other = {**kimi, "model_type": model, "max_position_embeddings": 8 * LONG}
        [note, ollama] = of(extend(other, 9 * LONG), "llama.cpp")["notes"]
        assert ollama == "In Ollama, -c is num_ctx, which can be 4,096 by default."  # Ollama, issue 16694
        assert note.endswith(f"--override-kv {name}.context_length=int:1179648.")
    mistral = {**FLAT, "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}}
    assert extend(mistral, LONG).facts["reaches"]  # Yarn-Mistral-7b-128k states 32,768 as well
    chunks = {**FLAT, "dual_chunk_attention_config": {"chunk_size": 8192, "original_max_position_embeddings": 16_384}}
    assert [bool(entry["commands"]) for entry in extend(chunks, LONG).facts["engines"]] == [False, False, True, True]
    assert from_config(chunks).trained_length == 16_384
    said = "beyond 16,384 tokens the model needs dual_chunk_attention_config, which vLLM and SGLang read."
    assert said in " ".join(extend(chunks, LONG).text().split())


def test_a_config_that_reaches_but_that_an_engine_misreads() -> None:
    """Falcon 2 11B: `conversion/falcon.py` writes no base. SGLang reads `attn_factor` in place of attention_factor."""
    falcon = {**FLAT, "model_type": "falcon", "new_decoder_architecture": True, "rope_theta": 500_042.0}
    found = extend({**falcon, "max_position_embeddings": 8192}, 8192, engines=("llama.cpp",))
    assert (found.facts["reaches"], found.complete) == (True, True)
    assert commands(found) == "llama-server -m MODEL.gguf --rope-scaling none --rope-freq-base 500042 -c 8192"
    assert "Without its arguments, layers 0-3 of 4: for 8,192 tokens, 63 pairs differ" in " ".join(found.text().split())
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "attention_factor": 1.0}
    given = keys(of(extend({**FLAT, "rope_scaling": yarn}, LONG), "SGLang")["commands"][0])
    assert given["max_position_embeddings"] == LONG
    assert given["rope_parameters"]["attn_factor"] * (0.1 * math.log(4.0) + 1) == pytest.approx(1.0)


def test_a_length_that_an_engine_takes_with_other_ropes() -> None:
    """gpt-oss states truncate, and `ggml_rope_yarn_corr_dims` of llama.cpp always rounds. Others may be unknown."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    oss = {**FLAT, "model_type": "gpt_oss", "head_dim": 64, "rope_theta": 150_000.0, "sliding_window": 128}
    oss |= {"rope_scaling": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0}, "max_position_embeddings": LONG}
    found = extend(oss, LONG, engines=("llama.cpp",))
    assert (found.complete, commands(found)) == (False, "")
    assert "For the length: llama-server -m MODEL.gguf -c 131072" in found.text()
    dynamic = {**FLAT, "model_type": "internlm2", "rope_scaling": {"type": "dynamic", "factor": 3.0}}
    [row] = extend(dynamic, 65_536, engines=("vllm",)).facts["engines"]  # its table has 32,768 rows
    assert (row["length"], "It never scales" in row["why_not"][0]) == ("", True)
    [row] = extend({**FLAT, "model_type": "falcon"}, 32_768, engines=("sglang",)).facts["engines"]
    assert (row["length"], row["why_not"]) == ("", ["layers 0-3 of 4: it has no model falcon."])
    unknown = {**FLAT, "model_type": "step3p5", "head_dim": 128, "layer_types": ["full_attention"] * 4}
    unknown |= {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e6}}}
    [row] = extend(unknown, 32_768, engines=("vllm",), ignore=("rope_theta",)).facts["engines"]
    assert row["length"] == "vllm serve MODEL --max-model-len 32768"
    rows = json.loads((Path(__file__).parents[1] / "golden" / "released.json").read_text())["rows"]
    [twice] = [row["config"] for row in rows if row["file"] == "434.json"]  # Laguna
    assert "of 40: which value it reads of" in " ".join(extend(twice, 262_144).text().split())


def test_a_model_without_positions() -> None:
    """No layer of Nemotron-H rotates, so its length is only a setting. vLLM and SGLang lack some such models."""
    config = {**FLAT, "model_type": "nemotron_h", "max_position_embeddings": 262_144}
    found = extend(config, 1_048_576)
    assert (found.complete, [plan.method for plan in found.plans]) == (True, ["none"])
    assert keys(of(found, "vLLM")["commands"][0]) == {"max_position_embeddings": 1_048_576}
    assert "No layer rotates tokens beyond a window, so only the length changes." in found.text()
    assert of(extend(config, 262_144), "vLLM")["commands"][0] == "vllm serve MODEL --max-model-len 262144"
    absent = of(extend({**config, "model_type": "jamba"}, 262_144, engines=("sglang",)), "SGLang")
    assert (absent["commands"], absent["why_not"]) == ([], ["it has no model jamba"])


def test_tokens_with_several_positions() -> None:
    """Engines divide the pairs among axes with YaRN, and vLLM computes another ramp then."""
    text = {**FLAT, "model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    found = extend({**text, "model_type": "qwen2_5_vl"}, LONG)
    assert [plan.method for plan in found.plans] == ["yarn"]
    assert found.config()["rope_parameters"]["mrope_section"] == [16, 24, 24]
    # get_rope of vLLM and SGLang passes mrope_section only to the classes without scaling and of YaRN.
    assert of(found, "vLLM")["why_not"][1] == "It can with method ntk"
    for method in ("linear", "llama3"):
        whole = {**text, "model_type": "qwen2_5_vl"}
        other = extend(whole, LONG, method=method, engines=("vllm", "sglang", "transformers"))
        assert [bool(entry["commands"]) for entry in other.facts["engines"]] == [False, False, True]
        assert "takes one position for each token" in of(other, "SGLang")["why_not"][0]
    assert of(found, "transformers")["commands"]
    assert of(found, "vLLM")["commands"] == []
    assert len(of(found, "vLLM")["why_not"]) == 2  # with another method it computes no other ramp
    [command] = of(found, "llama.cpp")["commands"]  # ggml_mrope_cache_init scales each pair as for one position
    assert f"--rope-scaling yarn --rope-scale 8 --yarn-orig-ctx 32768 {BETAS}" in command


def test_a_model_with_its_own_code() -> None:
    """Qwen's first model was trained for seq_length. An argument reaches it in a GGUF file."""
    qwen = {**FLAT, "model_type": "qwen", "kv_channels": 128, "rotary_emb_base": 10_000, "seq_length": 8192}
    qwen |= {"use_dynamic_ntk": True, "use_logn_attn": True}
    del qwen["rope_theta"]
    found = extend(qwen, LONG)
    assert "--rope-scale 32 --yarn-orig-ctx 8192 " in commands(found)
    assert of(found, "vLLM")["why_not"] == ["it has no model qwen"]
    # Qwen's config class passes rope_scaling on to rope_parameters of transformers 5, which qwen.py of SGLang reads.
    assert of(found, "SGLang")["reads"] == "the config that --write writes"
    # bailing_moe.py reads rope_parameters of the file in both. Ling 2.0 is not in transformers.
    ling = {**FLAT, "model_type": "bailing_moe_v2", "partial_rotary_factor": 0.5}
    for name, length in (("vLLM", "vllm serve MODEL --max-model-len"), ("SGLang", "MODEL --context-length")):
        assert of(found := extend(ling, LONG), name)["reads"] == "the config that --write writes"
        assert of(found, name)["length"].endswith(f"{length} {LONG}")


def test_factors_in_a_gguf_are_not_replaced() -> None:
    """The divisors of Llama 3's scheme are a tensor of the file, which llama.cpp's arguments do not remove."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    llama = {**FLAT, "model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": LONG, "rope_scaling": scaling}
    found = extend(llama, 2 * LONG, method="yarn", engines=("llama.cpp",))
    reason = "the factors of llama3 are a tensor of its file, which no argument replaces"
    assert (found.complete, of(found, "llama.cpp")["why_not"]) == (False, [reason])


def test_a_model_whose_file_has_the_keys_of_its_text_model_at_the_top(tmp_path: Path) -> None:
    """The command is run: transformers keeps such keys inside, and ignores them at the top."""
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, "model_type": "qwen2_5_vl", "rope_scaling": scaling}))
    found = extend(tmp_path, LONG, method="yarn", engines=("transformers", "sglang"), model=str(tmp_path))
    call = ast.parse(of(found, "transformers")["commands"][0], mode="eval").body
    assert isinstance(call, ast.Call)
    config = transformers.AutoConfig.from_pretrained(
        tmp_path, **{each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    )
    assert config.text_config.rope_parameters["rope_type"] == "yarn"
    assert config.text_config.max_position_embeddings == LONG
    loader = getattr(transformers, ast.unparse(call.func).removesuffix(".from_pretrained"))
    assert type(config) in loader._model_mapping
    assert list(keys(of(found, "SGLang")["commands"][0])) == ["text_config"]


def test_longrope_within_its_length() -> None:
    """vLLM and llama.cpp use the long list, as meant, and for short texts too (their rules are in rules_of_*.json)."""
    lists = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "original_max_position_embeddings": 4096}
    phi = {
        **FLAT,
        "model_type": "phi3",
        "max_position_embeddings": 32_768,
        "rope_scaling": {"type": "longrope", **lists},
    }
    found = extend(phi, 16_384)
    assert of(found, "vLLM")["commands"][0] == "vllm serve MODEL --max-model-len 16384"
    assert of(found, "llama.cpp")["commands"] == ["llama-server -m MODEL.gguf -c 16384"]
    with pytest.raises(RopeError, match="more than its 32,768 tokens, write that as max_position_embeddings into the"):
        extend(phi, 65_536)
    for name in ("vLLM", "llama.cpp"):
        [note, *_] = of(found, name)["notes"]
        assert note.startswith("Short texts are rotated otherwise: layers 0-3 of 4: for 4,096 tokens, 64 pairs differ")
    assert "so that token is not rotated" in of(found, "SGLang")["notes"][-1]
    dynamic = {**FLAT, "max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 8.0}}
    assert of(extend(dynamic, 16_384), "vLLM")["commands"] == []  # its long texts differ


def test_a_length_before_scaling_that_the_config_does_not_state(tmp_path: Path) -> None:
    """Qwen3-8B was trained for 32,768 tokens, though its config states 40,960: its card has these keys for 131,072."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    qwen3 = {**FLAT, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40_960}
    assert "32,768 tokens (40,960 are stated);" in from_config(qwen3).explain()
    found = extend(qwen3, LONG, method="yarn", new_factor=4.0)
    assert from_config({**qwen3, "max_position_embeddings": 262_144}).trained_length == 262_144  # Qwen3-4B-2507
    theirs = Qwen3RotaryEmbedding(AutoConfig.for_model(**qwen3, rope_scaling=card))
    np.testing.assert_allclose(from_config(found.config()).rope.inv_freq, theirs.inv_freq.numpy(), rtol=2e-5)
    assert "--rope-scale 4 --yarn-orig-ctx 32768" in commands(found)
    older = "Builds before its pull request 28030 serve no more than the file states, unless you add --override-kv "
    assert f"{older}qwen3.context_length=int:131072." in of(found, "llama.cpp")["notes"]
    assert [plan.factor for plan in extend(qwen3, 65_536).plans] == [2.0]  # 65,536 / 32,768, as the card says
    assert extend(qwen3, 40_960).complete  # only texts that "significantly" exceed 32,768 need YaRN, says its card
    assert [extend(qwen3, n).facts["reaches"] for n in (40_960, 40_961)] == [True, False]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(qwen3))
    arguments = ["extend", str(path), "--to", "128k", "--method", "yarn", "--factor", "4"]
    assert "It counts from 32,768 tokens. If the model card does not" in CliRunner().invoke(main, arguments).output
    asked = CliRunner().invoke(main, [*arguments, "--original", "40k"]).output
    assert "--yarn-orig-ctx 40960" in asked
    assert "It counts from" not in asked
    with pytest.raises(RopeError, match="original must not be given for a config with a scaling"):
        extend({**qwen3, "rope_scaling": card}, 2 * LONG, original=40_960)
    with pytest.raises(RopeError, match="original must be an integer of at least 1"):
        extend(qwen3, LONG, original=0)


def test_refusals() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "original_max_position_embeddings": 4096}
    phi = {**FLAT, "model_type": "phi3", "rope_scaling": {"type": "longrope", **lists}}
    with pytest.raises(
        RopeError, match=r"got longrope\. If the model card states more than its 32,768 tokens, write that as"
    ) as refused:
        extend(phi, LONG)
    override = "(llama.cpp: --override-kv <general.architecture>.context_length=int:131072)."
    assert str(refused.value).endswith(f"max_position_embeddings into the config {override}")
    with pytest.raises(RopeError, match="new_factor must be at least 4, the target / the length before scaling"):
        extend(FLAT, LONG, new_factor=2.0)
    for asked in ({"new_factor": 4.0}, {"method": "yarn"}):
        with pytest.raises(RopeError, match="to must be more than the 32,768 tokens of the config"):
            extend(FLAT, 16_384, **asked)
    two = {"model_type": "gptj", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 16, "rotary_dim": 2}
    with pytest.raises(RopeError, match="rotary_dim must be at least 4"):
        extend(two, 64, method="ntk")
    assert not extend(two, 64).complete
    for name in ("vlm", "torchtitan"):  # a trainer reads no config.json
        with pytest.raises(RopeError, match="engine must be one of"):
            extend(FLAT, LONG, engines=(name,))
    without = {key: value for key, value in FLAT.items() if key != "max_position_embeddings"}
    with pytest.raises(
        RopeError, match=r"must state a length in tokens, got none\. Add max_position_embeddings to the file"
    ):
        extend({**without, "model_type": "mistral"}, LONG)
    with pytest.raises(RopeError, match="must not reach the length as it is"):
        extend(FLAT, 32_768).config()


def test_the_command(tmp_path: Path) -> None:
    """The source stays as it is, and other files of the folder are linked."""
    source, folder = tmp_path / "model", tmp_path / "new" / "long"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(FLAT))
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "tokenizer_config.json").write_text('{"model_max_length": 32768}')
    arguments = ["extend", str(source), "--to", "128k", "--method", "yarn", "--factor", "4", "--write", str(folder)]
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0
    assert "the config, in place of rope_theta\n" in shown.output
    assert f"vllm serve {folder} --max-model-len 131072\n" in shown.output  # it needs no other keys
    assert f"from_pretrained({str(folder)!r})" in shown.output
    assert f"--rope-scale 4 --yarn-orig-ctx 32768 {BETAS}" in shown.output
    assert not ROWS["vLLM", "length tokenizer"]["accepted"]
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in shown.output
    written = json.loads((folder / "config.json").read_text())
    assert (written["rope_scaling"]["factor"], written["max_position_embeddings"]) == (4.0, LONG)
    tmp_path.rename(moved := tmp_path.with_name("moved"))  # as where both folders are mounted elsewhere
    assert (moved / "new" / "long" / "model.safetensors").read_bytes() == b"weights"
    moved.rename(tmp_path)
    assert json.loads((source / "config.json").read_text()) == FLAT
    newer = CliRunner().invoke(main, [*arguments[:-1], f"{folder}5", "--version", "5"])
    assert (newer.exit_code, "rope_scaling" in Path(f"{folder}5/config.json").read_text()) == (0, False)
    again = CliRunner().invoke(main, arguments)
    assert (again.exit_code, "the folder to write must not exist" in again.output) == (1, True)
    facts = json.loads(CliRunner().invoke(main, ["extend", str(folder), "--to", "128k", "--json"]).output)
    assert facts["reaches"]
    (source / "config.json").write_text(json.dumps({**FLAT, "model_type": "phi3", "sliding_window": 2047}))
    assert CliRunner().invoke(main, ["extend", str(source), "--to", "128k"]).exit_code == 2


def test_vllm_applies_no_dictionary_to_a_draft() -> None:
    """`SpeculativeConfig.compose_draft_hf_overrides` of vLLM 0.33.0 returns a function that ignores one.

    Of the length of a draft, which `_maybe_override_draft_max_position_embeddings` raises, nothing is said.
    """
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules"):
        drafts = extend({**FLAT, key: 1}, LONG, engines=("vllm",), method="yarn", new_factor=4.0)
        assert "Its MTP layers do not get this argument, and rotate as the file says." in drafts.text()
    for other in ({**FLAT, "num_nextn_predict_layers": 0}, FLAT):
        assert "MTP" not in extend(other, LONG, engines=("vllm",), method="yarn", new_factor=4.0).text()
    windows = {**FLAT, "model_type": "mistral", "sliding_window": 2047, "mtp_num_hidden_layers": 1}
    for config, length in (({**FLAT, "mtp_num_hidden_layers": 1}, 32_768), (windows, LONG)):
        assert "MTP" not in extend(config, length, engines=("vllm",)).text()  # only the length is passed


GGUF = {
    "context_length": 40_960, "embedding_length": 1024, "block_count": 28, "rope.freq_base": 1e6,
    "attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 128,
    "attention.value_length": 128, "feed_forward_length": 3072, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def test_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "q.gguf", GGUF, architecture="qwen3")
    found = CliRunner().invoke(main, ["extend", str(path), "--to", "160k", "--for", "llama.cpp,vllm"])
    flags = "--rope-scaling yarn --rope-scale 10 --yarn-orig-ctx 32768 --yarn-beta-fast 32 --yarn-beta-slow 1"
    assert f"llama-server -m {path} {flags} --rope-freq-base 1000000 -c 163840" in found.output
    assert "vllm serve MODEL --hf-overrides" in found.output
    assert found.exit_code == 0


@pytest.mark.parametrize(("architecture", "sections"), [("qwen35", (11, 11, 10)), ("qwen3vl", (24, 20, 20))])
def test_a_gguf_file_of_a_model_whose_config_has_a_text_config(
    tmp_path: Path, architecture: str, sections: tuple[int, ...]
) -> None:
    """As in the published config.json of Qwen 3.5, whose rope_parameters are inside, and of Qwen 3 VL."""
    keys = {"rope.dimension_sections": (*sections, 0), "rope.dimension_count": 2 * sum(sections)}
    path = gguf_files.write(tmp_path / "q.gguf", GGUF | keys, architecture=architecture)
    row = of(extend(path, 4 * 40_960, engines=("vllm",), new_factor=4.0, model="M"), "vLLM")
    text = json.loads(shlex.split(row["commands"][0])[4])["text_config"]["rope_parameters"]
    stated = {"rope_type": "yarn", "factor": 4.0, "mrope_section": [*sections], "mrope_interleaved": True}
    assert text.items() >= stated.items()
    assert text.get("partial_rotary_factor", 1.0) == sum(sections) / 64
    assert row["notes"] == ["MODEL is this model in a format that it reads."]


def test_a_params_json(tmp_path: Path) -> None:
    """The factor of Meta's scaling is not that of the new one. Only vLLM reads the file of Mistral itself."""
    meta = {"dim": 4096, "n_layers": 2, "n_heads": 32, "rope_theta": 5e5, "use_scaled_rope": True}
    path = tmp_path / "params.json"
    path.write_text(json.dumps(meta))
    arguments = ["extend", str(path), "--to", "256k", "--factor", "24"]
    assert ", got none. Add rope_scaling_factor to the file." in CliRunner().invoke(main, arguments).output
    stated = {"rope_scaling_factor": 8.0, "max_position_embeddings": LONG}
    path.write_text(json.dumps({**meta, **stated}))
    found = extend(path, 2 * LONG, new_factor=24.0, model=str(tmp_path))
    assert found.config()["rope_parameters"]["factor"] == 24.0
    assert (found.facts["trained_length"], found.facts["stated_length"]) == (8192, LONG)
    assert "vllm serve MODEL " in of(found, "vLLM")["commands"][0]
    inside = "If its config.json has a text_config, put the keys into that."  # as in a multimodal model
    assert of(found, "vLLM")["notes"] == [f"MODEL is this model in a format that it reads. {inside}"]
    refused = CliRunner().invoke(main, [*arguments, "--write", str(tmp_path / "new")])
    assert (refused.exit_code, "--write needs a config.json" in refused.output) == (1, True)
    path.write_text(json.dumps(ROWS["vLLM", "length of Mistral's params.json"]["config"]))
    found = extend(path, 2 * LONG, model=str(tmp_path))
    for engine, model in (("vLLM", str(tmp_path)), ("SGLang", "MODEL")):
        assert model in shlex.split(of(found, engine)["commands"][0])


def test_a_length_far_beyond_what_was_measured() -> None:
    """Yi-34B-Chat states 4,096 tokens, and there is another checkpoint for 200,000 (vLLM, issue 2565)."""
    words = "times as long is more than that: prefer a checkpoint trained for it."
    assert f"6.1 {words}" in " ".join(extend(FLAT, 200_000).text().split())
    assert words not in extend(FLAT, LONG).text()


@pytest.mark.parametrize(
    ("stated", "asked", "reached"),
    [(200_000, "200k", 200_000), (1_010_000, "1m", 1_010_000), (204_800, "200k", 204_800), (200_000, "204800", None)],
)
def test_k_stands_for_1000_if_the_config_states_that_length(
    tmp_path: Path, stated: int, asked: str, reached: int | None
) -> None:
    """Yi-34B-200K states 200,000 tokens, and Qwen2.5-7B-Instruct-1M 1,010,000."""
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**FLAT, "max_position_embeddings": stated}))
    facts = json.loads(CliRunner().invoke(main, ["extend", str(source), "--to", asked, "--json"]).output)
    assert (facts["reaches"], facts["target"]) == (reached is not None, reached or 204_800)


@pytest.mark.parametrize("length", ["16k", "128k"])
def test_a_key_that_is_ignored(tmp_path: Path, length: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**FLAT, "rope_fancy": 1}))
    arguments = ["extend", str(path), "--to", length, "--for", "vllm"]
    assert "pass --ignore rope_fancy" in CliRunner().invoke(main, arguments).output
    shown = CliRunner().invoke(main, [*arguments, "--ignore", "rope_fancy"])
    assert (shown.exit_code, "vllm serve" in shown.output) == (0, True)
    assert "Left out, as asked: rope_fancy." in shown.output


def test_options_without_an_effect(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    arguments = ["extend", str(tmp_path), "--to", "128k"]
    for option, value, other in (("--version", "5", "--write"), ("--dtype", "float16", "--measure")):
        refused = CliRunner().invoke(main, [*arguments, option, value])
        assert (refused.exit_code, f"{option} has no effect without {other}" in refused.output) == (2, True)
    refused = CliRunner().invoke(main, [*arguments, "--for", "vllm,"])
    assert (refused.exit_code, "a name is missing before or after a comma" in refused.output) == (2, True)


def test_an_engine_gets_the_first_method_that_it_has() -> None:
    found = extend(FLAT, LONG, engines=("vllm", "llama.cpp"), method={"llama3": 5.0, "yarn": 7.0})
    assert keys(of(found, "vLLM")["commands"][0])["rope_parameters"]["factor"] == 5.0
    assert "--rope-scaling yarn --rope-scale 7 " in commands(found)
    assert "rule from two small models" not in found.text()


def test_an_engine_without_arguments_reads_what_is_written(tmp_path: Path) -> None:
    """mlx-lm's models/qwen2.py reads rope_scaling and no rope_parameters, and models/gemma2.py reads neither."""
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    ran = CliRunner().invoke(main, ["extend", str(tmp_path), "--to", "128k", "--for", "mlx-lm"])
    assert (ran.exit_code, "It reads these ropes from the config that --write writes." in ran.output) == (0, True)
    extended = extend(tmp_path, LONG, engines=("mlx-lm",))
    written = write(extended, tmp_path, tmp_path / "new")
    assert "mlx-lm 0.32.2\n  It reads these ropes from the config as it is." in written.text()
    write(extended, tmp_path, tmp_path / "newer", version=5)
    newer = json.loads((tmp_path / "newer" / "config.json").read_text())
    [row] = extend(newer, 2 * LONG, engines=("mlx-lm",)).facts["engines"]
    assert row["reads"] == "the config that --write --version 4 writes"
    llama = {**FLAT, "model_type": "llama"}
    said = extend(llama, LONG - 1, engines=("mlx-lm", "exllamav3", "transformers-4")).text()
    assert said.count("Its limits of length were not looked up.") == 1
    assert "mlx_lm.server needs no argument, because its cache grows with the text\n" in said
    assert f"in TabbyAPI --max-seq-len {LONG - 1} --cache-size {LONG}\n" in said  # config_sample.yml: a multiple of 256
    said = extend(FLAT, LONG, engines=("lmdeploy",)).text()  # whose rules are those of its PyTorch engine
    assert f"For the length: lmdeploy serve api_server --backend pytorch MODEL --session-len {LONG}\n" in said
    found = extend(GEMMA_2, LONG, engines=("mlx-lm",))
    assert (found.complete, "It reads no scaling" in of(found, "mlx-lm")["why_not"][0]) == (False, True)
    assert of(found, "mlx-lm")["why_not"][-1] == "It can with method ntk"
    path = gguf_files.write(tmp_path / "q.gguf", GGUF, architecture="qwen3")
    assert not extend(path, 163_840, engines=("mlx-lm",)).complete


def test_a_base_that_was_passed_is_in_what_is_written(tmp_path: Path) -> None:
    """ntk states another base, which must not be compared with the one that was passed for the file."""
    config = {key: value for key, value in FLAT.items() if key != "rope_theta"} | {"model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = extend(tmp_path, LONG, engines=("mlx-lm",), method="ntk", base=1e6)
    assert of(found, "mlx-lm")["reads"] == "the config that --write writes"
    assert write(found, tmp_path, tmp_path / "new").complete


def test_written_for_an_engine_that_is_refused(tmp_path: Path) -> None:
    """A config of another name has no weights beside it, and an engine without a command does not read the folder."""
    (tmp_path / "gemma2.json").write_text(json.dumps(GEMMA_2))
    (tmp_path / "other.bin").write_text("")
    ran = CliRunner().invoke(
        main,
        ["extend", str(tmp_path / "gemma2.json"), "--to", "64k", "--for", "sglang", "--write", str(tmp_path / "new")],
    )
    assert ran.exit_code == 2
    reason = "No command: It reads no scaling, so nothing is scaled.\n  It can with --method ntk."
    assert reason in ran.output
    assert extend(GEMMA_2, LONG, engines=("sglang",), method="ntk").complete
    assert str(tmp_path) + " " not in ran.output
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["config.json"]
