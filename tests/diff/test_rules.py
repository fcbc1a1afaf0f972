"""Compare the rules of each engine with numbers that its own code computed for small configs (golden files)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, SarvamMLAConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from each import each
from ropewalk import Rope, diff, from_config
from ropewalk.configs.engine_ropes import ropes_for_engines
from ropewalk.engines import ENGINES, MORE_ENGINES, TRAINERS, ConfigRope, Engine
from ropewalk.schemes import SCHEMES, build

FOLDER = Path(__file__).parents[1] / "golden" / "engine_rules"
FILES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx-lm": "mlx_lm",
    "exllamav3": "exllamav3",
    "llama.cpp": "llama_cpp",
}
MORE = {"transformers-4": "transformers_4", "onnxruntime-genai": "onnxruntime_genai", "lmdeploy": "lmdeploy"}


def golden(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"rules_of_{({**FILES, **MORE})[name]}.json").read_text())
    return loaded


@pytest.mark.parametrize("name", [*FILES, *MORE])
def test_rules_are_those_of_the_running_engine(name: str) -> None:
    """A rule gives the frequencies within float32 rounding, the attention factor, and the refusals of the engine."""
    found = golden(name)
    engine = {**ENGINES, **MORE_ENGINES}[name]
    peer = found["peer"]
    assert peer["version"] == engine.version if "version" in peer else peer["commit"].startswith(engine.version)
    seen = set()

    def check(row: dict[str, Any]) -> None:
        # In the golden rows of Gemma, the rope is that of the last kind of layer.
        [*_, (config_rope, _)] = ropes_for_engines(row["config"])[1]
        answer = engine.apply_rule(config_rope)
        seen.add("default" if config_rope.rope.scaling is None else config_rope.rope.scaling.rope_type)
        rope = answer.at(row["sequence"], row["setting"])
        if "refused" in row:
            assert rope is None
            assert answer.refusal
            return
        assert rope is not None, answer.refusal
        # Powers in float32 have an error of 2.4e-7, and of 5.3e-7 in MLX. YaRN's weight of the unscaled frequency is
        # rounded to 2⁻²⁴, and this error is `factor` times as large relative to the scaled frequency.
        factor = getattr(config_rope.rope.scaling, "factor", None) or 1.0
        np.testing.assert_allclose(rope.inv_freq, row["inv_freq"], rtol=6e-7 + 2**-24 * factor, atol=0)
        assert rope.attention_factor == pytest.approx(row["attention_factor"], rel=2e-7)

    each(((row["case"], row) for row in found["rows"]), check)
    run = {scheme for scheme, rule in engine.rules.items() if rule.evidence == "run"}
    assert run <= seen, "a rule says that it was run, and no golden value holds it"


def test_warnings_of_yarn_about_engines() -> None:
    """The warnings of YaRN about mscale agree with the same recorded numbers."""
    rows = {
        name: {row["case"]: row["attention_factor"] for row in golden(name)["rows"] if "inv_freq" in row}
        for name in FILES
    }
    alone, zero = "yarn, mscale 0.707", "yarn, mscale 0.707, mscale_all_dim 0"
    both = "yarn, mscale = mscale_all_dim = 1"
    assert [name for name in FILES if rows[name][alone] != rows[name]["yarn, nothing"]] == ["mlx-lm"]
    assert [name for name in FILES if rows[name][zero] != rows[name][alone]] == ["sglang"]
    assert {name for name in FILES if rows[name][both] != 1.0} == {"exllamav3", "llama.cpp"}
    cases = {row["case"]: row["config"] for row in golden("vllm")["rows"]}
    for case in (alone, zero):
        assert "mlx-lm uses one alone and SGLang a 0." in " ".join(from_config(cases[case]).warnings)
    assert "so the attention factor is 1. Not every engine computes this" in " ".join(from_config(cases[both]).warnings)


def test_the_name_that_some_engines_have_for_yarn_of_deepseek() -> None:
    """vLLM computes deepseek_scaling_rope.py, as SGLang does; transformers raises, and llama.cpp writes no scaling."""
    config = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 1, "num_hidden_layers": 1}
    config["rope_parameters"] = YARN | {"rope_type": "deepseek_yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7}
    with pytest.raises(KeyError, match="deepseek_yarn"):
        LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
    [(rope, _)] = ropes_for_engines(config)[1]
    answers = {name: ENGINES[name].answer(rope) for name in FILES}
    assert {name for name, answer in answers.items() if answer.why == "refused"} == {"transformers", "exllamav3"}
    for name in ("vllm", "sglang"):
        assert answers[name].rope is not None
        assert answers[name].rope.attention_factor == pytest.approx(0.07 * math.log(40) + 1, rel=1e-12)
    assert answers["llama.cpp"].rope is not None
    assert answers["llama.cpp"].rope.scaling is None


def test_sarvam() -> None:
    """transformers renames deepseek_yarn for Sarvam 105B, which llama.cpp lacks; for 30B it writes the whole head."""
    config = {"hidden_size": 128, "num_attention_heads": 1, "num_hidden_layers": 1, "rope_theta": 1e4}
    scaling = YARN | {"type": "deepseek_yarn"}
    del scaling["rope_type"]
    larger = {**config, "model_type": "sarvam_mla", "rope_scaling": scaling}
    larger |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
    assert SarvamMLAConfig(**copy.deepcopy(larger)).rope_parameters["rope_type"] == "yarn"
    larger["architectures"] = ["SarvamMLAForCausalLM"]
    smaller = {**config, "model_type": "sarvam_moe", "architectures": ["SarvamMoEForCausalLM"]}
    for case, state in ((larger, "absent"), (smaller, "same")):
        found = diff.engines(case, length=8192, names=("transformers", "llama.cpp"))
        assert found.facts["states"] == {"transformers": "same", "llama.cpp": state}


KEYS = {
    "yarn, attention_factor 1.2": {"attention_factor"},
    "yarn, attn_factor 0.5": {"attn_factor"},
    "yarn, extrapolation_factor 0.5": {"extrapolation_factor"},
    "yarn, truncate false": {"truncate"},
    "yarn, betas 16 and 2": {"beta_fast", "beta_slow"},
    "longrope, attention_factor": {"attention_factor"},
    "longrope, mscales, long": {"short_mscale", "long_mscale"},
    "proportional, factor 2": {"factor"},
}
PLAIN = {"yarn": "yarn, nothing", "long": "longrope, 131072 of 131072", "prop": "proportional"}


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_keys_without_effect_are_noted_as_ignored(name: str) -> None:
    """A key that changes no number is noted as ignored, except by the rules that have other notes about it."""
    rows = {row["case"]: row for row in golden(name)["rows"]}
    for case, keys in KEYS.items():
        row, plain = rows[case], rows[PLAIN[case[:4]]]
        [*_, (config_rope, _)] = ropes_for_engines(row["config"])[1]
        notes = " ".join(ENGINES[name].apply_rule(config_rope).notes)
        said = all(key in notes for key in keys) and "ignores" in notes
        same = (row["attention_factor"], row["inv_freq"]) == (plain["attention_factor"], plain["inv_freq"])
        if row["config"]["model_type"] == plain["config"]["model_type"]:
            assert said == same, (case, notes)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LISTS = {"short_factor": [2.0] * 32, "long_factor": [10.0] * 32, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
STATED: list[dict[str, Any]] = [
    YARN | {"attention_factor": 1.2},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    YARN | {"truncate": False, "attn_factor": 0.5},
    {"rope_type": "longrope", **LISTS, "attention_factor": 1.2},
    {"rope_type": "longrope", **LISTS, "short_mscale": 1.1, "long_mscale": 1.3},
    {"rope_type": "dynamic", "alpha": 1000.0, "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "linear", "factor": 4.0},
]
BRANCHES = (
    "llama phi3 phi4_multimodal phimoe minicpm3 deepseek_v2 deepseek_v3 axk1 gpt_oss glm4_moe qwen3_next exaone_moe "
    "gemma3_text hunyuan_v1_dense ministral3 mistral4"
)
"""A model_type for each branch of a rule."""


def applied(engine: Engine, model: str, section: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the notes of the rule for a section of a config, and its numbers at a short and at a long length."""
    scheme = SCHEMES[section["rope_type"]].class_for_keys(section.keys() - {"rope_type"})
    fields: Any = {field.name for field in dataclasses.fields(scheme)}  # type: ignore[arg-type]
    values = {key: value for key, value in section.items() if key in fields}
    values |= {key: value for key, (value, _) in scheme.derived_fields(values, 131_072).items()}
    rope = Rope(64, 10_000.0, "half", scaling=build(scheme, values))
    answer = engine.apply_rule(ConfigRope(rope, model_type=model, longest=131_072, section=section))
    ropes = [answer.at(length, length) for length in (64, 131_072)]
    return " ".join(answer.notes), [(rope.inv_freq.tolist(), rope.attention_factor) for rope in ropes if rope]


def changed(value: Any) -> Any:
    if isinstance(value, list):
        return [1.5 * number for number in value]
    return not value if isinstance(value, bool) else 1.5 * value


@pytest.mark.parametrize("name", [*ENGINES, *MORE_ENGINES, *TRAINERS])
def test_a_key_that_is_said_to_be_ignored_changes_no_number(name: str) -> None:
    """Of any model: rules that branch on the model_type name the keys of the branch."""
    engine = {**ENGINES, **MORE_ENGINES, **TRAINERS}[name]
    for model, section in itertools.product(BRANCHES.split(), STATED):
        notes, numbers = applied(engine, model, section)
        for ignored in re.findall(r"It ignores ([a-z_, ]+)\.", notes):
            for key in ignored.split(", "):
                assert applied(engine, model, {**section, key: changed(section[key])})[1] == numbers, (model, key)


def test_what_transformers_does_at_the_switch_of_longrope() -> None:
    """Only the classes of Phi-3 and Phi-4-multimodal drop the cache there, and that of PhiMoE needs both mscales."""
    section = {"rope_type": "longrope", **LISTS, "attention_factor": 1.2}
    found = {model: applied(ENGINES["transformers"], model, section) for model in BRANCHES.split()}
    assert {model for model, (notes, _) in found.items() if "drops" in notes} == {"phi3", "phi4_multimodal"}
    assert [model for model, (_, numbers) in found.items() if not numbers] == ["phimoe"]
