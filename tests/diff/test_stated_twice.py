"""Configs that state a rope parameter twice: each engine takes one by its own rule (golden files `twice_of_ENGINE`).

The configs are those of stated_twice.json, which has what transformers takes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk import RopeError, diff, from_config

GOLDEN = Path(__file__).parents[1] / "golden"
STATED = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
SEQUENCE = 512
"""The length for which the ropes were recorded."""


def rows(path: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / path).read_text())["rows"]  # type: ignore[no-any-return]


CASES = {
    row["model_type"]: {case: each["keys"] for case, each in row["cases"].items()} for row in rows("stated_twice.json")
}
DEFAULTS = {row["model_type"]: row["config"] for row in rows("class_defaults.json") if "variant" not in row}
COMPARED = {"mlx-lm": 1250, "llama.cpp": 1200, "vllm": 840, "sglang": 890, "transformers-4": 1350}
"""At least so many cases were compared."""


def numbers(rope: Any) -> list[float]:
    """As in stated_twice.json: rotary_dim, the second, middle and last frequency, and the attention factor."""
    static = rope.at_length(SEQUENCE)
    inv_freq = np.sort(static.inv_freq[static.inv_freq > 0])[::-1]
    last = len(inv_freq) - 1
    chosen = (inv_freq[min(1, last)], inv_freq[last // 2], inv_freq[last])
    return [2 * len(inv_freq), *map(float, chosen), static.attention_factor]


def outcome(config: dict[str, Any], engine: str, recorded: dict[str, list[float]] | str) -> str:
    """Compare an engine's ropes with the recorded ones. Return "same", "not judged", or what is wrong."""
    try:
        layers = from_config(config, engine=engine, text_only=True).layers
    except RopeError as e:
        if "must run the config" not in str(e):
            return "not read"
        if "was not recorded" in str(e):
            return "not judged"
        return "same" if isinstance(recorded, str) else f"said: {e}"
    if isinstance(recorded, str):
        return "same" if recorded == "not recorded" else f"recorded: {recorded}"
    for layer, theirs in recorded.items():
        rope = layers[int(layer)]
        if rope is not None and not np.allclose(numbers(rope), theirs, rtol=3e-6, atol=0):
            return f"layer {layer}: {numbers(rope)} instead of {theirs}"
    return "same"


@pytest.mark.parametrize("name", COMPARED)
def test_what_each_engine_takes(name: str) -> None:
    found: dict[tuple[str, str], str] = {}
    for row in rows(f"engine_models/twice_of_{name.replace('-', '_').replace('.', '_')}.json"):
        model_type = row["model_type"]
        default = {key: value for key, value in DEFAULTS[model_type].items() if key not in STATED}
        for case, recorded in row["cases"].items():
            config = {**default, "model_type": model_type, **row.get("added", {}), **CASES[model_type][case]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[model_type, case] = outcome(config, name, recorded)
    wrong = {key: each for key, each in found.items() if each not in ("same", "not judged", "not read")}
    assert not wrong
    assert sum(each == "same" for each in found.values()) >= COMPARED[name]


def test_the_keys_that_an_engine_reads_are_named() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    config = {**LLAMA, "max_position_embeddings": 4096, "rope_theta": 1e6, "rope_parameters": parameters}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    text = " ".join(diff.engines(config, names=("mlx-lm",)).text(verbose=True).split())
    assert "stated twice, it reads the base from rope_theta and the scaling from rope_scaling." in text


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_scaling_with_type_alone_in_a_class_with_rope_types_of_its_own(name: str) -> None:
    """The classes of transformers keep their own rope_type beside it. vLLM rejects two that differ."""
    judged = set()
    for row in rows(f"engine_models/models_of_{name}.json"):
        parts = [part.get("others", {}) for part in row.get("kinds", {}).values()]
        recorded = {part["rope_scaling only type"] for part in parts if "rope_scaling only type" in part}
        default = DEFAULTS.get(row["model_type"], {})
        if not recorded or not default:
            continue
        config = {key: value for key, value in default.items() if key not in STATED} | {"model_type": row["model_type"]}
        config["rope_scaling"] = {"type": "linear", "factor": 2.0}
        modernbert = {"global_rope_theta": 1e6, "local_rope_theta": 1e4}
        config |= modernbert if "modernbert" in row["model_type"] else {"rope_theta": 1e6}
        with warnings.catch_warnings(), contextlib.suppress(RopeError):
            warnings.simplefilter("ignore")
            if "type" in from_config(config, text_only=True).stated_twice:
                states = diff.engines(config, names=("transformers", name), length=SEQUENCE).facts["states"]
                why = " ".join(sorted(recorded))
                expected = "refused" if "Error" in why else "same" if why == "dropped" else "unknown"
                assert expected in states.values(), row["model_type"]
                judged.add(row["model_type"])
    assert judged >= {"gemma3_text", "modernbert"} - ({"modernbert"} if name == "sglang" else set())


def test_an_override_without_a_base_in_vllm() -> None:
    """--hf-overrides replaces rope_parameters, and the file of the model then takes a base of its own."""
    recorded = json.loads((GOLDEN / "engine_models/override_in_vllm.json").read_text())
    wrong, compared = {}, 0
    for row in recorded["rows"]:
        name, theirs = row["model_type"], row["frequencies"]
        default = {key: value for key, value in DEFAULTS[name].items() if key not in STATED}
        parameters = {"rope_type": "default", "rope_theta": 123_456.0}
        config = {**default, "model_type": name, "rope_parameters": parameters}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = diff.engines(config, names=("vllm",), length=SEQUENCE, override=recorded["override"]).facts
        ours = [at["engines"]["vLLM"] for rope in found["ropes"] for at in rope["at"] if at["engines"]]
        if isinstance(theirs, str) or not ours:
            wrong |= {name: found["states"]} if ours else {}
            continue
        compared += 1
        pairs = ours[0]["inv_freq"], theirs[min(theirs)]
        if not np.allclose([pairs[0][1], pairs[0][-1]], [pairs[1][1], pairs[1][3]], rtol=3e-6, atol=0):
            wrong[name] = pairs
    assert not wrong
    assert compared >= 25


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "stated", [{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, {"rope_theta": 5e5}]
)
@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": {**YARN, "rope_theta": 7e5}},
        {"rope_scaling": {**YARN, "rope_theta": 7e5}},
        {"rope_theta": 7e5},
    ],
)
def test_an_override_in_transformers(stated: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    config = {**LLAMA, "intermediate_size": 8, "max_position_embeddings": 4096, **stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = diff.engines(config, names=("transformers", "sglang"), override=keys)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **copy.deepcopy(keys)).model.rotary_emb
    except TypeError:
        assert found.facts["states"]["transformers"] == "refused"
        return
    ours = found.facts["ropes"][0]["at"][0]["engines"]["transformers"]
    np.testing.assert_allclose(ours["inv_freq"], theirs.inv_freq.numpy(), rtol=1e-6)
    assert ours["attention_factor"] == pytest.approx(theirs.attention_scaling)


def test_axes_that_transformers_does_not_read() -> None:
    """It takes rope_scaling in place of rope_parameters, with the base and the sections in it."""
    from transformers import Qwen3_5TextConfig

    axes = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, **axes}
    config = {**DEFAULTS["qwen3_5_text"], "rope_parameters": parameters, "rope_scaling": YARN}
    theirs = Qwen3_5TextConfig.from_dict(copy.deepcopy(config)).rope_parameters
    assert axes.keys().isdisjoint(theirs)
    found = diff.engines(config, names=("transformers", "vllm"))
    assert "4 · 1,024 tokens" not in found.text(verbose=True)  # the ramp that vLLM computes with mrope_section
    assert found.verdict == "agree"
    ours = found.facts["ropes"][0]["at"][0]["engines"]["vLLM"]["inv_freq"]
    assert ours[1] == pytest.approx(theirs["rope_theta"] ** (-1 / 32))


def test_an_override_that_sglang_merges() -> None:
    config = {**LLAMA, "max_position_embeddings": 4096, "rope_theta": 5e5}
    found = diff.engines(config, override={"rope_scaling": YARN})
    [row] = found.facts["ropes"]
    assert row["at"][0]["engines"]["SGLang"]["inv_freq"][1] == pytest.approx(5e5 ** (-1 / 16))
    assert {name for name, state in found.facts["states"].items() if state == "unknown"} == {
        "llama.cpp",
        "mlx-lm",
        "exllamav3",
    }
    assert "llama.cpp 0c1e57098 was not judged: it has no argument that overrides keys of a config, but" in found.text()


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_a_base_beside_the_scaling_in_an_override() -> None:
    """vLLM 0.33 sets plain keys, then objects, so the setter of transformers reads the base. SGLang keeps the old."""
    from transformers import LlamaConfig

    theirs = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    theirs.update({"rope_theta": 7e5})
    theirs.rope_scaling = dict(YARN)
    config = {**LLAMA, "max_position_embeddings": 4096, "rope_theta": 5e5}
    for keys in ({"rope_theta": 7e5, "rope_scaling": YARN}, {"rope_scaling": YARN, "rope_theta": 7e5}):
        [row] = diff.engines(config, names=("vllm", "sglang"), override=keys).facts["ropes"]
        bases = {name: found["inv_freq"][1] ** -16 for name, found in row["at"][0]["engines"].items()}
        assert bases == pytest.approx({"vLLM": theirs.rope_parameters["rope_theta"], "SGLang": 5e5})
    glm = {**LLAMA, "model_type": "glm4", "head_dim": 32, "max_position_embeddings": 4096, "rope_theta": 5e5}
    said = diff.engines(glm, names=("vllm",), override=keys).text()
    assert "without partial_rotary_factor was not recorded, so state this, too" in " ".join(said.split())


def test_an_override_of_a_model_inside() -> None:
    """sglang#27974: keys at the top change nothing, and inside, SGLang 0.5.23 replaces the object with the base."""
    config = {"model_type": "qwen3_5", "text_config": {**DEFAULTS["qwen3_5_text"], "model_type": "qwen3_5_text"}}
    found = diff.engines(config, names=("vllm", "sglang"), override={"rope_scaling": YARN})
    assert "the ropes of vLLM and SGLang, because those are in text_config." in " ".join(found.text().split())
    found = diff.engines(config, names=("vllm", "sglang"), override={"text_config": {"rope_scaling": YARN}})
    assert found.facts["states"] == {"vLLM": "same", "SGLang": "unknown"}
    assert "because those are in" not in found.text()


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic"])
@pytest.mark.parametrize("states_length", [False, True])
def test_engines_that_refuse_the_length_of_an_override(rope_type: str, states_length: bool) -> None:
    """vLLM's context_extension_offline.py states max_model_len in hf_overrides, where vLLM 0.33 does not read it."""
    config = {**LLAMA, "max_position_embeddings": 40_960, "rope_theta": 1e6}
    parameters = {"rope_type": rope_type, "rope_theta": 1e6, "factor": 4.0}
    parameters |= {"original_max_position_embeddings": 32_768} if rope_type == "yarn" else {}
    keys = {"max_position_embeddings": 131_072} if states_length else {"max_model_len": 131_072}
    said = diff.engines(config, override={"rope_parameters": parameters, **keys}).facts["warnings"]
    of_limits = [
        line for line in said if line.startswith("vLLM and SGLang accept no more than max_position_embeddings, 40,")
    ]
    assert bool(of_limits) == (rope_type == "yarn" and not states_length)


def test_a_class_that_scales_by_default() -> None:
    """ApertusConfig puts rope_theta beside a rope_scaling, and takes its own base and scaling if there is none."""
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
    llama3["original_max_position_embeddings"] = 8192
    config = {**LLAMA, "model_type": "apertus", "max_position_embeddings": 65536, "rope_theta": 777.0}
    for scaling, base in ((llama3, 777.0), (None, 1.2e7)):
        names = ("transformers", "vllm", "sglang")
        found = diff.engines({**config, "rope_scaling": scaling}, names=names).facts["ropes"][0]["at"][0]["engines"]
        assert [each["inv_freq"][1] for each in found.values()] == pytest.approx([base ** (-1 / 16)] * 3)


def test_an_engine_without_the_model() -> None:
    """Exllamav3 has no class for CWM, whose scaling transformers adds to a base."""
    config = {**LLAMA, "model_type": "cwm", "head_dim": 32, "max_position_embeddings": 65536, "rope_theta": 1e6}
    assert [*diff.engines(config, names=("transformers", "exllamav3")).facts["states"].values()] == [
        "same",
        "absent",
    ]
